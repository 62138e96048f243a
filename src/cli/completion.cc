// rarefy completion: a script for a shell, made of the commands and options that there are.
#include <algorithm>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "cli/common.h"

namespace rarefy::cli {

namespace {

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
  return text;
}

std::vector<std::string> options_of(const CLI::App& app) {
  std::vector<std::string> found;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) found.push_back("--" + name);
  }
  std::sort(found.begin(), found.end());
  return found;
}

// For bash; -o default completes file names where none of our words fits.
void print_script(const CLI::App& app) {
  std::vector<std::string> commands = options_of(app);
  std::string cases;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    commands.push_back(command->get_name());
    cases += "    " + command->get_name() + ") words=\"" + joined(options_of(*command)) + "\" ;;\n";
  }
  std::cout << "_rarefy() {\n"
               "  local words\n"
               "  case ${COMP_WORDS[1]} in\n"
            << cases
            << "    *) words= ;;\n"
               "  esac\n"
               "  [ \"$COMP_CWORD\" -gt 1 ] || words=\""
            << joined(commands)
            << "\"\n"
               "  COMPREPLY=($(compgen -W \"$words\" -- \"${COMP_WORDS[COMP_CWORD]}\"))\n"
               "}\n"
               "complete -o default -F _rarefy rarefy\n";
}

}  // namespace

void add_completion(CLI::App& app, Exit& exit) {
  CLI::App* command = app.add_subcommand("completion", "Print a script that completes this command's words");
  command->footer(
      "Put  source <(rarefy completion bash)  into ~/.bashrc, or the same with zsh into ~/.zshrc.");
  auto shell = std::make_shared<std::string>();
  command->add_option("shell", *shell, "bash or zsh")->required()->check(CLI::IsMember({"bash", "zsh"}));
  command->callback([&app, &exit, shell] {
    if (*shell == "zsh") std::cout << "autoload -U +X bashcompinit && bashcompinit\n";
    print_script(app);
    exit = kOk;
  });
}

}  // namespace rarefy::cli
