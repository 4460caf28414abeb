/* What this process may use: CPUs and memory, after control groups (version 1 and 2), limits and affinity. */
#if defined(__linux__)
#define _GNU_SOURCE /* for the affinity mask */
#endif
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>
#if defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include "internal.h"

#if defined(__linux__)
/* The first two numbers of a small file; "max" and a missing file give UINT64_MAX. */
static bool read_numbers(const char *path, uint64_t *a, uint64_t *b) {
  FILE *f = fopen(path, "re");
  if (!f) return false;
  char first[32] = "";
  unsigned long long second = 0;
  int n = fscanf(f, "%31s %llu", first, &second);
  fclose(f);
  char *end;
  unsigned long long v = strtoull(first, &end, 10);
  *a = n >= 1 && *end == 0 && first[0] != '-' ? v : UINT64_MAX;
  *b = n >= 2 ? second : 0;
  return n >= 1;
}

/* Whether a controller is among those of a line of /proc/self/cgroup, "cpu,cpuacct". */
static bool is_listed(const char *controllers, const char *wanted) {
  size_t n = strlen(wanted);
  for (const char *c = controllers; c; c = strchr(c, ','), c = c ? c + 1 : NULL)
    if (!strncmp(c, wanted, n) && (!c[n] || c[n] == ',')) return true;
  return false;
}

/* Whether a component of the path is "..": the group lies outside of what this process sees. */
static bool leads_out(const char *path) {
  for (const char *at = path; (at = strstr(at, "..")); at += 2)
    if ((at == path || at[-1] == '/') && (!at[2] || at[2] == '/')) return true;
  return false;
}

/* Calls `see` for one file of this process's control group and of all groups above it, in every hierarchy that may limit the controller. A line is
 * `id:controllers:path`, without controllers in version 2. Inside a container the path may be that of the host: then only the top is there. */
static void cgroup_each(const char *root, const char *controller, const char *v2_name, const char *v1_name,
                        void (*see)(const char *path, void *user), void *user) {
  char line[4096], file[8192];
  snprintf(file, sizeof file, "%s/proc/self/cgroup", root);
  FILE *f = fopen(file, "re");
  while (f && fgets(line, sizeof line, f)) {
    line[strcspn(line, "\n")] = 0;
    char *kind = strchr(line, ':'), *path = kind ? strchr(kind + 1, ':') : NULL;
    if (!path) continue;
    *path++ = 0;
    kind++;
    bool v2 = !*kind;
    if ((!v2 && !is_listed(kind, controller)) || leads_out(path)) continue;
    for (char *end = path + strlen(path);; *end = 0) {
      if (v2)
        snprintf(file, sizeof file, "%s/sys/fs/cgroup%s/%s", root, path, v2_name);
      else
        snprintf(file, sizeof file, "%s/sys/fs/cgroup/%s%s/%s", root, controller, path, v1_name);
      see(file, user);
      if (!*path) break;
      while (end > path && *--end != '/') {
      }
    }
  }
  if (f) fclose(f);
}

/* Version 2 has both numbers in one file, version 1 the period in another one beside it. */
static void see_quota(const char *path, void *user) {
  uint64_t quota, period, unused, *cpus = user;
  char beside[8192];
  if (!read_numbers(path, &quota, &period) || quota == UINT64_MAX) return;
  size_t at = strlen(path) - strlen("quota_us");
  if (!period && !strcmp(path + at, "quota_us")) {
    snprintf(beside, sizeof beside, "%.*speriod_us", (int)at, path);
    if (!read_numbers(beside, &period, &unused) || period == UINT64_MAX) return;
  }
  if (!quota || !period) return;
  uint64_t n = quota / period + (quota % period != 0);
  if (n < *cpus) *cpus = n;
}

static void see_limit(const char *path, void *user) {
  uint64_t limit, unused, *bytes = user;
  if (read_numbers(path, &limit, &unused) && limit < *bytes) *bytes = limit;
}
#endif

/* With `root` before every path of a file, for the tests. */
uint32_t ds4_cpus_under(const char *root) {
  uint64_t n = 0;
#if defined(__linux__)
  cpu_set_t set;
  if (!sched_getaffinity(0, sizeof set, &set)) n = (uint64_t)CPU_COUNT(&set);
#endif
  if (!n) {
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    n = online > 0 ? (uint64_t)online : 1;
  }
#if defined(__linux__)
  cgroup_each(root, "cpu", "cpu.max", "cpu.cfs_quota_us", see_quota, &n);
#else
  (void)root;
#endif
  return (uint32_t)(n > 256 ? 256 : n);
}

uint64_t ds4_memory_under(const char *root) {
  uint64_t bytes = 0;
#if defined(__APPLE__)
  size_t size = sizeof bytes;
  sysctlbyname("hw.memsize", &bytes, &size, NULL, 0);
#else
  bytes = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
#endif
#if defined(__linux__)
  cgroup_each(root, "memory", "memory.max", "memory.limit_in_bytes", see_limit, &bytes);
#else
  (void)root;
#endif
  static const int limits[] = {RLIMIT_AS, RLIMIT_DATA};
  for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
    struct rlimit r;
    if (!getrlimit(limits[i], &r) && r.rlim_cur != RLIM_INFINITY && r.rlim_cur < bytes) bytes = r.rlim_cur;
  }
  return bytes;
}

uint32_t ds4_usable_cpus(void) { return ds4_cpus_under(""); }
uint64_t ds4_usable_memory(void) { return ds4_memory_under(""); }
