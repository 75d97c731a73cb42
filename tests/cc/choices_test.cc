// The table of choices: what selection takes for each line of choices.tsv. A change of a cost model
// shows there, line by line; with --write the program writes the table.
//
// A line is GPU, problem key, the choice of "native" with its slices, the choice of "auto" ("=":
// the same, "xla": the layer is left to XLA).
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "cuda/common/registry.h"
#include "cuda/common/select.h"

namespace jaxconv {
namespace {

std::string Choice(const ConvProblem& problem, const Gpu& gpu, const char* algorithm) {
  Selection selection;
  if (Status status = Select(problem, gpu, algorithm, &selection); !status.ok()) {
    return status.message();
  }
  if (selection.instance.empty()) return "xla";
  return selection.instance + "/" + std::to_string(selection.slices);
}

int Main(bool write) {
  std::string path = __FILE__;
  path = path.substr(0, path.rfind('/') + 1) + "choices.tsv";
  std::ifstream file(path);
  std::string written;
  int failures = 0, lines = 0;
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line);
    std::string target, key, native, automatic;
    std::getline(fields, target, '\t');
    std::getline(fields, key, '\t');
    std::getline(fields, native, '\t');
    std::getline(fields, automatic, '\t');
    ConvProblem problem;
    Gpu gpu;
    if (!ModelOf(target, &gpu) || !ConvProblem::Parse(key, &problem).ok()) {
      std::printf("FAIL cannot read %s\n", line.c_str());
      return 1;
    }
    ++lines;
    const std::string native_now = Choice(problem, gpu, "native");
    std::string automatic_now = Choice(problem, gpu, "auto");
    if (automatic_now == native_now) automatic_now = "=";
    written += target + '\t' + key + '\t' + native_now + '\t' + automatic_now + '\n';
    if (write || (native_now == native && automatic_now == automatic)) continue;
    ++failures;
    std::printf("FAIL %s %s: expected %s and %s, got %s and %s\n", target.c_str(), key.c_str(),
                native.c_str(), automatic.c_str(), native_now.c_str(), automatic_now.c_str());
  }
  if (write) std::ofstream(path) << written;
  std::printf("choices_test: %d lines, %d failures\n", lines, failures);
  return failures != 0 || lines == 0;
}

}  // namespace
}  // namespace jaxconv

int main(int argc, char** argv) {
  return jaxconv::Main(argc > 1 && std::string(argv[1]) == "--write");
}
