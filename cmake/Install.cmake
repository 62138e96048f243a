# What `cmake --install` puts in place: library, public headers and the CMake package.
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
