// Switching from one stack to another: what the emulator's threads, which are fibers, run on.
#ifndef JAXCONV_TESTS_EMULATOR_CONTEXT_H_
#define JAXCONV_TESTS_EMULATOR_CONTEXT_H_

#include <cstddef>

namespace emulator {

constexpr size_t kStackBytes = 512 << 10;

// Where a waiting thread's registers lie: on its stack.
struct Context {
  void* stack_pointer = nullptr;
};

// The first switch to the context calls `entry`, which does not return. The stack has kStackBytes.
void Prepare(Context* context, unsigned char* stack, void (*entry)());

void SwitchContext(Context* from, Context* to);

}  // namespace emulator

#endif  // JAXCONV_TESTS_EMULATOR_CONTEXT_H_
