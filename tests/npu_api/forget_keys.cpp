// A CUDA build of torch has registered the settings of its allocator; torch-npu registers some of the same names, and
// torch ends the process. Here no GPU is used, so its names may go.
#include <string>
#include <unordered_set>

extern std::unordered_set<std::string> keys asm(
    "_ZZN3c1016CachingAllocator26AcceleratorAllocatorConfig14getMutableKeysB5cxx11EvE4keys");

extern "C" void forget_keys() { keys.clear(); }
