// This build, and a choice of kernels, as JSON: what `rarefy info` prints and what Python reads. In a header,
// as both users have nlohmann-json and those who link the library need not.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "core/message.h"
#include "rarefy/backend.h"

namespace rarefy {

using Json = nlohmann::ordered_json;

// Texts and times without which there is nothing to say are null.
inline Json text_or_null(const std::string& text) { return text.empty() ? Json(nullptr) : Json(text); }
inline Json time_or_null(double time) { return time > 0 ? Json(time) : Json(nullptr); }

inline Json to_json(const Explanation& e) {
  Json candidates = Json::array();
  for (const Candidate& candidate : e.candidates) {
    candidates.push_back({{"kernel", candidate.kernel.name},
                          {"family", candidate.kernel.family},
                          {"chosen", candidate.chosen},
                          {"why_not", candidate.why_not}});
  }
  return {{"problem", to_string(e.problem)},
          {"kernel", text_or_null(e.kernel)},
          {"config", e.config},
          {"workspace", e.workspace},
          {"aligned_copies", e.aligned_copies},
          {"predicted_us", time_or_null(e.microseconds)},
          {"dense_us", time_or_null(e.dense_microseconds)},
          {"why_none", e.why_none},
          {"candidates", std::move(candidates)}};
}

// One line of a table of choices: the kernel, and why it or none.
inline Json summary(const Explanation& e, const std::string& forced) {
  std::string passed_over;
  for (const Candidate& candidate : e.candidates) {
    if (candidate.chosen) break;
    passed_over += cat(passed_over.empty() ? "" : "; ", candidate.kernel.name, ": ", candidate.why_not);
  }
  const std::string why = e.kernel.empty()      ? e.why_none
                          : !forced.empty()     ? cat("forced by ", forced)
                          : passed_over.empty() ? "first in order of preference"
                                                : cat("first that fits, after ", passed_over);
  return {{"op", name(e.problem.op)},
          {"dtype", name(e.problem.in)},
          {"device", name(e.problem.device)},
          {"kernel", text_or_null(e.kernel)},
          {"why", why}};
}

// All but the kernels, of which each caller has its own list.
inline Json to_json(const BackendInfo& info) {
  Json devices = Json::array();
  for (const DeviceInfo& device : info.cuda_devices) devices.push_back(to_string(device));
  return {{"version", info.version},
          {"cpu", info.machine.cpu},
          {"cpu_features", info.machine.features},
          {"machine", to_string(info.machine)},
          {"cuda_built", info.cuda_built},
          {"cuda_devices", std::move(devices)},
          {"forced_impl", text_or_null(info.forced)}};
}

}  // namespace rarefy
