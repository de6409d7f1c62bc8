// A cache is made, filled, read and freed by different modules of one program, each with its own hidden copy of the
// library, and one of them is unloaded in between (B06). What a cache needs lies in the cache; but the kernels and the
// default memory source are code of the module that made it.
//
// Usage: plugin_host PLUGIN_A PLUGIN_B
#include <dlfcn.h>

#include <cstdio>

#include "plugin.hpp"

namespace {

class Module {
 public:
  explicit Module(const char* path) : path_(path), handle_(dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
    void* found = handle_ != nullptr ? dlsym(handle_, "describe_plugin") : nullptr;
    if (found == nullptr) {
      std::puts(dlerror());
      return;
    }
    reinterpret_cast<void (*)(Plugin*)>(found)(&functions);
  }
  /// True if it is gone.
  bool unload() { return dlclose(handle_) == 0 && dlopen(path_, RTLD_NOW | RTLD_NOLOAD) == nullptr; }
  bool is_loaded() const { return functions.create != nullptr; }

  Plugin functions{};

 private:
  const char* path_;
  void* handle_;
};

int failures = 0;

void expect(bool holds, const char* what) {
  if (holds) return;
  ++failures;
  std::puts(what);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 1;
  const Plugin host = functions_of_this_module();
  SharedCache* plain = host.create();
  turboquant::SequenceId id, other;
  expect(plain->create_sequence(id) == turboquant::Status::ok && host.append(*plain, id, 0, 300), "host alone");
  const float wanted = host.attend(*plain, id);
  host.destroy(plain);

  // Made here, filled by A, which is gone when it is read and filled again.
  SharedCache* ours = host.create();
  {
    Module a(argv[1]);
    if (!a.is_loaded()) return 1;
    expect(ours->create_sequence(id) == turboquant::Status::ok && a.functions.append(*ours, id, 0, 200), "A appends");
    expect(a.functions.attend(*ours, id) > 0, "A attends");
    expect(ours->fork(id, 150, other) == turboquant::Status::ok && a.functions.append(*ours, other, 150, 150), "fork");
    expect(a.unload(), "A stays loaded");
  }
  Module b(argv[2]);
  if (!b.is_loaded()) return 1;
  expect(b.functions.append(*ours, id, 200, 100), "B appends");
  expect(host.attend(*ours, id) == wanted && b.functions.attend(*ours, id) == wanted, "filled by A and B");
  expect(b.functions.attend(*ours, other) == wanted, "forked by A");
  b.functions.destroy(ours);

  // Made by A, filled here, read and freed by B; then A may go.
  Module a(argv[1]);
  SharedCache* theirs = a.functions.create();
  expect(theirs->create_sequence(id) == turboquant::Status::ok && host.append(*theirs, id, 0, 300), "host appends");
  expect(b.functions.attend(*theirs, id) == wanted, "made by A");
  b.functions.destroy(theirs);
  expect(a.unload(), "A stays loaded");
  expect(b.unload(), "B stays loaded");
  return failures == 0 ? 0 : 1;
}
