// Switches between stacks: each thread of the emulator is a fiber with a stack of its own.
#ifndef JAXCONV_TESTS_EMULATOR_CONTEXT_H_
#define JAXCONV_TESTS_EMULATOR_CONTEXT_H_

#include <cstddef>

namespace emulator {

constexpr size_t kStackBytes = 512 << 10;

// The state of a suspended fiber. Its registers are saved on its stack.
struct Context {
  void* stack_pointer = nullptr;
};

// The first switch to the context calls `entry`, which does not return. The stack has kStackBytes.
void Prepare(Context* context, unsigned char* stack, void (*entry)());

void SwitchContext(Context* from, Context* to);

}  // namespace emulator

#endif  // JAXCONV_TESTS_EMULATOR_CONTEXT_H_
