# Says in one sentence that a compiler is too old, before it says so itself in a hundred.
include(CheckCXXSourceCompiles)
if("cxx_std_20" IN_LIST CMAKE_CXX_COMPILE_FEATURES)
  check_cxx_source_compiles("
    #include <bit>
    #include <compare>
    #include <concepts>
    #include <span>
    struct Pair { int a, b; bool operator==(const Pair&) const = default; };
    int main() {
      const int numbers[] = {1, 2};
      const auto first = []<std::integral T>(std::span<const T> s) { return std::bit_cast<unsigned>(s[0]); };
      return first(std::span<const int>(numbers)) == 1U && Pair{.a = 1, .b = 2} == Pair{1, 2} ? 0 : 1;
    }" RAREFY_CXX20)
endif()
if(NOT RAREFY_CXX20)
  message(FATAL_ERROR "rarefy needs a compiler and a standard library with C++20 (GCC 12, clang 14 or later); "
                      "got ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}, ${CMAKE_CXX_COMPILER}. "
                      "Give another one with -DCMAKE_CXX_COMPILER=…, in a fresh build folder")
endif()
