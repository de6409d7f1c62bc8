// One of two plug-ins: everything of the library is hidden in it.
#include "plugin.hpp"

extern "C" [[gnu::visibility("default")]] void describe_plugin(Plugin* plugin) { *plugin = functions_of_this_module(); }
