// The cache of plans: repeated look-ups, its size limit, eviction of the least recently used,
// threads.
#include "cuda/plan_cache.h"

#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "cc/expect.h"
#include "cuda/registry.h"

namespace jaxconv {
namespace {

constexpr const char* kInstance = "fprop_igemm_simt_f32_64x64x8_vec";

std::string Key(int n) {
  return "fprop f32:f32:f32 highest b1 n" + std::to_string(n) +
         " g1 c64 k64 i8x8 f3x3 o8x8 s1x1 l1x1 d1x1 p1_1x1_1";
}

// Describes every device as an H200, except 7, which does not exist; counts the queries.
struct Devices {
  int asked = 0;
  Status operator()(int device, Gpu* gpu) {
    ++asked;
    if (device == 7) return Status::Internal("no device 7");
    ModelOf("h200", gpu);
    return {};
  }
};

std::shared_ptr<const PlannedCall> Find(PlanCache& cache, const std::string& key, int device = 0,
                                        const char* instance = kInstance, int64_t slices = 1) {
  std::shared_ptr<const PlannedCall> call;
  const Status status = cache.Find({key, instance, slices, device}, &call);
  Expect(status.ok(), key + ": " + status.message());
  return call;
}

void TestFound() {
  Devices devices;
  PlanCache cache(4, std::ref(devices));
  const auto first = Find(cache, Key(1));
  Expect(first != nullptr && first->kernel == FindKernel(kInstance) && first->problem.n == 1 &&
             first->plan.params != nullptr,
         "a plan has its problem, its instance and its parameters");
  Expect(Find(cache, Key(1)) == first && devices.asked == 1, "the second call makes nothing");
  Expect(Find(cache, Key(1), 1) != first, "another device has a plan of its own");
  Expect(Find(cache, Key(2)) != first, "so has another problem");
  Expect(Find(cache, Key(1), 0, "fprop_igemm_simt_f32_128x64x8_vec") != first,
         "and another instance");
  Expect(cache.size() == 4, "four plans");
}

void TestBounded() {
  PlanCache cache(2, Devices());
  const auto first = Find(cache, Key(1));
  const auto second = Find(cache, Key(2));
  Expect(Find(cache, Key(1)) == first, "used again");
  Find(cache, Key(3));
  Expect(cache.size() == 2, "the bound holds");
  Expect(Find(cache, Key(1)) == first, "the recently used plan stays");
  Expect(Find(cache, Key(2)) != second, "the least recently used one was dropped");
  Expect(second->problem.n == 2, "and outlives that while in use");
}

void TestErrors() {
  PlanCache cache(2, Devices());
  std::shared_ptr<const PlannedCall> call;
  auto code = [&](const std::string& key, const char* instance, int64_t slices, int device) {
    return cache.Find({key, instance, slices, device}, &call).code();
  };
  Expect(code("nonsense", kInstance, 1, 0) == StatusCode::kInvalidArgument, "an unreadable key");
  Expect(code(Key(1), "nothing", 1, 0) == StatusCode::kInvalidArgument, "an unknown instance");
  Expect(code(Key(1), kInstance, 0, 0) == StatusCode::kInvalidArgument, "no slice");
  Expect(code(Key(1), kInstance, 2, 0) != StatusCode::kOk, "slices that the kernel has not");
  Expect(code(Key(1), kInstance, 1, 7) == StatusCode::kInternal, "a device that does not exist");
  Expect(code(Key(1), "wgrad_igemm_simt_f32_64x64x8_vec", 1, 0) == StatusCode::kUnimplemented,
         "another operation's instance");
  Expect(cache.size() == 0, "failures are not kept");
}

void TestThreads() {
  PlanCache cache(8, [](int, Gpu* gpu) {
    ModelOf("h200", gpu);
    return Status();
  });
  std::vector<std::thread> threads;
  std::vector<int> wrong(4, 0);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&cache, &wrong, t] {
      for (int i = 0; i < 400; ++i) {
        const int n = 1 + (i * 7 + t) % 16;
        std::shared_ptr<const PlannedCall> call;
        const std::string key = Key(n);
        const bool found = cache.Find({key, kInstance, 1, 0}, &call).ok();
        wrong[t] += !found || call->problem.n != n;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int count : wrong) Expect(count == 0, "every thread gets the plan of its key");
  Expect(cache.size() <= 8, "the bound holds among threads");
}

}  // namespace
}  // namespace jaxconv

int main() {
  jaxconv::TestFound();
  jaxconv::TestBounded();
  jaxconv::TestErrors();
  jaxconv::TestThreads();
  std::printf("plan_cache_test: %d failures\n", jaxconv::failures);
  return jaxconv::failures != 0;
}
