#include "cuda/select/select.h"

#include <algorithm>
#include <string>
#include <vector>

#include "cuda/select/kernel_table.h"

namespace jaxconv {
namespace {

Status UnknownAlgorithm(std::string_view algorithm) {
  std::vector<std::string> families;
  for (const KernelRow& row : KernelTable()) {
    if (std::find(families.begin(), families.end(), row.family) == families.end()) {
      families.push_back(row.family);
    }
  }
  std::string message = "algorithm: expected auto, an instance name or a family (";
  for (size_t i = 0; i < families.size(); ++i) message += (i > 0 ? ", " : "") + families[i];
  return Status::InvalidArgument(message + "), got '" + std::string(algorithm) + "'");
}

}  // namespace

Status Select(const ConvProblem& problem, const DeviceInfo& device, std::string_view algorithm,
              Selection* selection) {
  *selection = Selection();
  bool known = algorithm == "auto";
  double best_cost = 0;
  for (const KernelRow& row : KernelTable()) {
    const bool named = row.name == algorithm;
    if (!named && row.family != algorithm && algorithm != "auto") continue;
    known = true;
    if (row.op != problem.op) {
      // Only worth a word to someone who asked for this very kernel.
      if (named) {
        selection->refusals.push_back(
            {row.name, std::string("expected ") + Name(row.op) + ", got " + Name(problem.op)});
      }
      continue;
    }
    if (device.compute_capability() < row.min_cc || device.compute_capability() > row.max_cc) {
      selection->refusals.push_back(
          {row.name, "needs compute capability " + std::to_string(row.min_cc) +
                         (row.max_cc == row.min_cc ? " exactly" : "") + ", the device has " +
                         std::to_string(device.compute_capability())});
      continue;
    }
    if (Status status = row.can_implement(problem); !status.ok()) {
      selection->refusals.push_back({row.name, status.message()});
      continue;
    }
    const int64_t slices = row.slices(problem, device);
    const double cost = row.cost(problem, device, slices);
    // Strictly cheaper: of equals the earlier row wins, whatever the platform's library.
    if (selection->instance.empty() || cost < best_cost) {
      best_cost = cost;
      selection->instance = row.name;
      selection->slices = slices;
      selection->workspace_bytes = row.workspace_bytes(problem, slices);
    }
  }
  return known ? Status() : UnknownAlgorithm(algorithm);
}

}  // namespace jaxconv
