# Warnings and sanitizers for our own targets, not for those that use the library.
function(rarefy_warnings target)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow>)
endfunction()

if(RAREFY_SANITIZE)
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${RAREFY_SANITIZE};-fno-omit-frame-pointer;-fno-sanitize-recover=all;-g1>")
  add_link_options(-fsanitize=${RAREFY_SANITIZE})
endif()
