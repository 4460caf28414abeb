/* CPUs and memory that a process may use, on made-up trees of /proc and /sys in a temporary folder. */
#define _GNU_SOURCE
#include <errno.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "internal.h"

#define GB (1ull << 30)

/* One file of the tree `root`, with the folders above it. */
static void put(const char *root, const char *name, const char *text) {
  char path[512];
  snprintf(path, sizeof path, "%s/%s", root, name);
  for (char *at = strchr(path, '/'); at; at = strchr(at + 1, '/')) {
    *at = 0;
    if (mkdir(path, 0777) && errno != EEXIST) perror(path);
    *at = '/';
  }
  FILE *f = fopen(path, "w");
  if (!f) {
    perror(path);
    return;
  }
  fputs(text, f);
  fclose(f);
}

static int same(const char *root, uint64_t cpus, uint64_t memory) {
  uint64_t found = ds4_cpus_under(root), bytes = ds4_memory_under(root);
  if (found == cpus && bytes == memory) return 0;
  fprintf(stderr, "%s: %llu CPUs and %llu bytes, expected %llu and %llu\n", root, (unsigned long long)found, (unsigned long long)bytes,
          (unsigned long long)cpus, (unsigned long long)memory);
  return 1;
}

static int drop(const char *path, const struct stat *st, int type, struct FTW *at) {
  (void)st, (void)type, (void)at;
  return remove(path);
}

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

int main(void) {
#if !defined(__linux__)
  return ds4_usable_cpus() > 0 && ds4_usable_memory() > 0 ? 0 : 1;
#endif
  char folder[] = "/tmp/ds4-limits-XXXXXX";
  if (!mkdtemp(folder) || chdir(folder)) return perror(folder), 1;
  uint64_t cpus = ds4_cpus_under("limits-none"), memory = ds4_memory_under("limits-none");
  int wrong = !cpus || !memory || ds4_usable_cpus() > cpus || ds4_usable_memory() > memory;

  /* version 2: the least of the group and all above it */
  put("limits-v2", "proc/self/cgroup", "0::/a/b\n");
  put("limits-v2", "sys/fs/cgroup/a/b/memory.max", "max\n");
  put("limits-v2", "sys/fs/cgroup/a/memory.max", "1073741824\n");
  put("limits-v2", "sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
  put("limits-v2", "sys/fs/cgroup/a/cpu.max", "50000 100000\n");
  wrong |= same("limits-v2", 1, least(GB, memory));

  /* the top counts too, and a quota is rounded up */
  put("limits-top", "proc/self/cgroup", "0::/\n");
  put("limits-top", "sys/fs/cgroup/memory.max", "1073741824\n");
  put("limits-top", "sys/fs/cgroup/cpu.max", "100001 100000");
  wrong |= same("limits-top", least(2, cpus), least(GB, memory));

  /* version 1 on the host, where groups are folders, and inside a container, where only the top is there */
  for (int inside = 0; inside < 2; inside++) {
    const char *root = inside ? "limits-inside" : "limits-host";
    put(root, "proc/self/cgroup", "4:memory:/docker/a\n3:cpuset:/elsewhere\n2:cpu,cpuacct:/docker/a\n0::/\n");
    put(root, inside ? "sys/fs/cgroup/memory/memory.limit_in_bytes" : "sys/fs/cgroup/memory/docker/a/memory.limit_in_bytes",
        "2147483648\n");
    put(root, inside ? "sys/fs/cgroup/cpu/cpu.cfs_quota_us" : "sys/fs/cgroup/cpu/docker/a/cpu.cfs_quota_us", "50000\n");
    put(root, inside ? "sys/fs/cgroup/cpu/cpu.cfs_period_us" : "sys/fs/cgroup/cpu/docker/a/cpu.cfs_period_us", "50000\n");
    if (!inside) put(root, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
    wrong |= same(root, 1, least(2 * GB, memory));
  }

  /* dots in a group's name lead nowhere else */
  put("limits-dots", "proc/self/cgroup", "0::/a..b/..c/d..\n");
  put("limits-dots", "sys/fs/cgroup/a..b/..c/d../memory.max", "1073741824\n");
  wrong |= same("limits-dots", cpus, least(GB, memory));

  /* odd trees limit nothing */
  put("limits-odd", "proc/self/cgroup", "no line\n0::/../../elsewhere\n0::/a/..\n7:cpu\n0::/a\n");
  put("limits-odd", "elsewhere/memory.max", "1\n");
  put("limits-odd", "sys/fs/cgroup/memory.max", "what\n");
  put("limits-odd", "sys/fs/cgroup/a/memory.max", "-5\n");
  put("limits-odd", "sys/fs/cgroup/cpu.max", "0 0\n");
  put("limits-odd", "sys/fs/cgroup/a/cpu.max", "5 0\n");
  wrong |= same("limits-odd", cpus, memory);
  if (!wrong) printf("%llu CPUs, %llu bytes\n", (unsigned long long)ds4_usable_cpus(), (unsigned long long)ds4_usable_memory());
  if (chdir("/") || nftw(folder, drop, 8, FTW_DEPTH | FTW_PHYS)) perror(folder);
  return wrong;
}
