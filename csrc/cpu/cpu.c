#include "host.h"
const ds4_ops ds4_cpu_ops = {.name = "cpu"};
