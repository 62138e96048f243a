# GTest::gtest and GTest::gtest_main: the system's, or built when cross-compiling, for which Debian has the
# sources alone (/usr/src/googletest).
if(CMAKE_CROSSCOMPILING AND NOT TARGET GTest::gtest)
  add_subdirectory(/usr/src/googletest ${PROJECT_BINARY_DIR}/googletest EXCLUDE_FROM_ALL)
elseif(NOT CMAKE_CROSSCOMPILING)
  find_package(GTest REQUIRED)
endif()
include(GoogleTest)
