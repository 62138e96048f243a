# GTest::gtest and GTest::gtest_main: the system's, or built when cross-compiling, for which Debian has the
# sources alone (/usr/src/googletest).
if(CMAKE_CROSSCOMPILING AND NOT TARGET GTest::gtest)
  add_subdirectory(/usr/src/googletest ${PROJECT_BINARY_DIR}/googletest EXCLUDE_FROM_ALL)
elseif(NOT CMAKE_CROSSCOMPILING)
  find_package(GTest REQUIRED)
endif()
include(GoogleTest)

# The tests of a program in `shares` processes, instead of one each: ctest takes .07 s around every process, as long as
# a test runs. One alone: the program with --gtest_filter. ARGN: its arguments.
function(rarefy_tests_in_shares program name shares)
  foreach(share RANGE 1 ${shares})
    math(EXPR index "${share} - 1")
    add_test(NAME ${name}.${share} COMMAND ${program} --gtest_brief=1 ${ARGN})
    set_tests_properties(${name}.${share} PROPERTIES
      ENVIRONMENT "GTEST_TOTAL_SHARDS=${shares};GTEST_SHARD_INDEX=${index}"
      TIMEOUT 7200)  # a sanitizer's, or an emulator's, take long
  endforeach()
endfunction()
