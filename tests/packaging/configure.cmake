# cmake -D… -P configure.cmake: configures SOURCE into a fresh folder WORK with OPTIONS. That must succeed, or
# with FAILS fail, and print MESSAGE. With FILE_API as IDEs do, with WRAPPED by a compiler CXX that knows C++17.
file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})
if(FILE_API)
  file(WRITE ${WORK}/.cmake/api/v1/query/codemodel-v2 "")
endif()
if(WRAPPED)
  file(WRITE ${WORK}/old-compiler "#!/bin/sh\nexec ${CXX} \"$@\" -std=c++17\n")
  file(CHMOD ${WORK}/old-compiler PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
  list(APPEND OPTIONS -DCMAKE_CXX_COMPILER=${WORK}/old-compiler)
endif()
execute_process(COMMAND ${CMAKE_COMMAND} -S ${SOURCE} -B ${WORK} -G Ninja ${OPTIONS}
                RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
string(REGEX REPLACE "[ \n]+" " " output "${output}")  # CMake breaks long lines
string(FIND "${output}" "${MESSAGE}" found)
if(FAILS AND result EQUAL 0 OR NOT FAILS AND NOT result EQUAL 0 OR found EQUAL -1)
  message(FATAL_ERROR "exit code ${result}, and the text that should have \"${MESSAGE}\":\n${output}")
endif()
