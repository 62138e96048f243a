# What `cmake --install` puts in place: library, public headers, the CMake package and rarefy.pc.
include(CMakePackageConfigHelpers)

install(TARGETS rarefy EXPORT rarefyTargets
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR}
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/rarefy DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})

set(RAREFY_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/rarefy)
install(EXPORT rarefyTargets NAMESPACE rarefy:: DESTINATION ${RAREFY_CMAKE_DIR})
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/rarefyConfig.cmake.in
  ${PROJECT_BINARY_DIR}/rarefyConfig.cmake INSTALL_DESTINATION ${RAREFY_CMAKE_DIR})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/rarefyConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)  # before 1.0 a minor version may change the API
install(FILES ${PROJECT_BINARY_DIR}/rarefyConfig.cmake ${PROJECT_BINARY_DIR}/rarefyConfigVersion.cmake
  DESTINATION ${RAREFY_CMAKE_DIR})

# For those who build with something else. Whoever links the static library has to link what it uses.
set(rarefy_pc_libs "-lrarefy")
if(NOT BUILD_SHARED_LIBS)
  string(APPEND rarefy_pc_libs " -pthread")
  foreach(library ${CMAKE_CXX_IMPLICIT_LINK_LIBRARIES})  # which a program in C does not have of itself
    if(library MATCHES "^(stdc\\+\\+|c\\+\\+|m)$")
      string(APPEND rarefy_pc_libs " -l${library}")
    endif()
  endforeach()
  if(RAREFY_HAS_CUDA)
    get_target_property(rarefy_cudart CUDA::cudart_static IMPORTED_LOCATION)
    string(APPEND rarefy_pc_libs " ${rarefy_cudart} -lrt -ldl")
  endif()
endif()
file(RELATIVE_PATH rarefy_pc_prefix ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
string(REGEX REPLACE "/$" "" rarefy_pc_prefix "${rarefy_pc_prefix}")
configure_file(${PROJECT_SOURCE_DIR}/cmake/rarefy.pc.in ${PROJECT_BINARY_DIR}/rarefy.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/rarefy.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
