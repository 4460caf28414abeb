/* CRC-32C: the CPU's instruction where there is one, else eight table lookups for eight bytes (slicing-by-8). */
#include "crc32c.h"

#include <string.h>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif
#endif

/* A table is linear: entry i is the exclusive or of the entries of i's bits. So eight numbers make a table of 256. */
#define BIT(i, n, b) ((i) >> (n) & 1 ? (b) : 0u)
#define ONE(i, b0, b1, b2, b3, b4, b5, b6, b7)                                                                                             \
  (BIT(i, 0, b0) ^ BIT(i, 1, b1) ^ BIT(i, 2, b2) ^ BIT(i, 3, b3) ^ BIT(i, 4, b4) ^ BIT(i, 5, b5) ^ BIT(i, 6, b6) ^ BIT(i, 7, b7))
#define FOUR(i, ...) ONE(i, __VA_ARGS__), ONE(i + 1, __VA_ARGS__), ONE(i + 2, __VA_ARGS__), ONE(i + 3, __VA_ARGS__)
#define SIXTEEN(i, ...) FOUR(i, __VA_ARGS__), FOUR(i + 4, __VA_ARGS__), FOUR(i + 8, __VA_ARGS__), FOUR(i + 12, __VA_ARGS__)
#define SIXTYFOUR(i, ...) SIXTEEN(i, __VA_ARGS__), SIXTEEN(i + 16, __VA_ARGS__), SIXTEEN(i + 32, __VA_ARGS__), SIXTEEN(i + 48, __VA_ARGS__)
#define TABLE(...) {SIXTYFOUR(0, __VA_ARGS__), SIXTYFOUR(64, __VA_ARGS__), SIXTYFOUR(128, __VA_ARGS__), SIXTYFOUR(192, __VA_ARGS__)}

/* table[k][i]: what byte i does to the checksum when k more bytes follow it. */
static const uint32_t table[8][256] = {
    TABLE(0xf26b8303u, 0xe13b70f7u, 0xc79a971fu, 0x8ad958cfu, 0x105ec76fu, 0x20bd8edeu, 0x417b1dbcu, 0x82f63b78u),
    TABLE(0x13a29877u, 0x274530eeu, 0x4e8a61dcu, 0x9d14c3b8u, 0x3fc5f181u, 0x7f8be302u, 0xff17c604u, 0xfbc3faf9u),
    TABLE(0xa541927eu, 0x4f6f520du, 0x9edea41au, 0x38513ec5u, 0x70a27d8au, 0xe144fb14u, 0xc76580d9u, 0x8b277743u),
    TABLE(0xdd45aab8u, 0xbf672381u, 0x7b2231f3u, 0xf64463e6u, 0xe964b13du, 0xd725148bu, 0xaba65fe7u, 0x52a0c93fu),
    TABLE(0x38116facu, 0x7022df58u, 0xe045beb0u, 0xc5670b91u, 0x8f2261d3u, 0x1ba8b557u, 0x37516aaeu, 0x6ea2d55cu),
    TABLE(0xef306b19u, 0xdb8ca0c3u, 0xb2f53777u, 0x6006181fu, 0xc00c303eu, 0x85f4168du, 0x0e045bebu, 0x1c08b7d6u),
    TABLE(0x68032cc8u, 0xd0065990u, 0xa5e0c5d1u, 0x4e2dfd53u, 0x9c5bfaa6u, 0x3d5b83bdu, 0x7ab7077au, 0xf56e0ef4u),
    TABLE(0x493c7d27u, 0x9278fa4eu, 0x211d826du, 0x423b04dau, 0x847609b4u, 0x0d006599u, 0x1a00cb32u, 0x34019664u),
};

uint32_t ds4_crc32c_tables(uint32_t crc, const void *data, size_t n) {
  const uint8_t *p = data;
  crc = ~crc;
  for (; n >= 8; n -= 8, p += 8) {
    uint32_t low = crc ^ (p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24);
    crc = table[7][low & 255] ^ table[6][low >> 8 & 255] ^ table[5][low >> 16 & 255] ^ table[4][low >> 24] ^ table[3][p[4]] ^
          table[2][p[5]] ^ table[1][p[6]] ^ table[0][p[7]];
  }
  for (; n; n--, p++) crc = table[0][(crc ^ *p) & 255] ^ crc >> 8;
  return ~crc;
}

#if defined(__x86_64__)

#define HARDWARE
#define STEP8(crc, v) (uint32_t)_mm_crc32_u64(crc, v)
#define STEP1(crc, v) _mm_crc32_u8(crc, v)
#define TARGET __attribute__((target("sse4.2")))
static int hardware(void) { return __builtin_cpu_supports("sse4.2"); }

#elif defined(__aarch64__) && (defined(__linux__) || defined(__ARM_FEATURE_CRC32))

#define HARDWARE
#if defined(__clang__)
#define STEP8(crc, v) __builtin_arm_crc32cd(crc, v)
#define STEP1(crc, v) __builtin_arm_crc32cb(crc, v)
#define TARGET __attribute__((target("crc")))
#else
#define STEP8(crc, v) __crc32cd(crc, v)
#define STEP1(crc, v) __crc32cb(crc, v)
#define TARGET __attribute__((target("+crc")))
#endif
#if defined(__ARM_FEATURE_CRC32)
static int hardware(void) { return 1; }
#else
static int hardware(void) { return (getauxval(AT_HWCAP) & 1u << 7) != 0; } /* HWCAP_CRC32 */
#endif

#endif

#ifdef HARDWARE

/* One instruction waits three cycles for the one before it, so three lanes run side by side, and the checksums of the first two are moved
 * over the bytes behind them. `lane` is that move over LANE zero bytes: linear too, table k for byte k of the checksum. */
#define LANE 1024u
static const uint32_t lane[4][256] = {
    TABLE(0xfe314258u, 0xf98ef241u, 0xf6f19273u, 0xe80f5217u, 0xd5f2d2dfu, 0xae09d34fu, 0x59ffd06fu, 0xb3ffa0deu),
    TABLE(0x6213374du, 0xc4266e9au, 0x8da0abc5u, 0x1ead217bu, 0x3d5a42f6u, 0x7ab485ecu, 0xf5690bd8u, 0xef3e6141u),
    TABLE(0xdb90b473u, 0xb2cd1e17u, 0x60764adfu, 0xc0ec95beu, 0x84355d8du, 0x0d86cdebu, 0x1b0d9bd6u, 0x361b37acu),
    TABLE(0x6c366f58u, 0xd86cdeb0u, 0xb535cb91u, 0x6f87e1d3u, 0xdf0fc3a6u, 0xbbf3f1bdu, 0x720b958bu, 0xe4172b16u),
};

static uint32_t over_lane(uint32_t crc) {
  return lane[0][crc & 255] ^ lane[1][crc >> 8 & 255] ^ lane[2][crc >> 16 & 255] ^ lane[3][crc >> 24];
}

static uint64_t load8(const uint8_t *p) {
  uint64_t v;
  memcpy(&v, p, sizeof v);
  return v;
}

TARGET static uint32_t by_instruction(uint32_t crc, const uint8_t *p, size_t n) {
  for (; n >= 3 * LANE; n -= 3 * LANE, p += 3 * LANE) {
    uint32_t second = 0, third = 0;
    for (uint32_t i = 0; i < LANE; i += 8) {
      crc = STEP8(crc, load8(p + i));
      second = STEP8(second, load8(p + LANE + i));
      third = STEP8(third, load8(p + 2 * LANE + i));
    }
    crc = over_lane(over_lane(crc) ^ second) ^ third;
  }
  for (; n >= 8; n -= 8, p += 8) crc = STEP8(crc, load8(p));
  for (; n; n--, p++) crc = STEP1(crc, *p);
  return crc;
}

uint32_t ds4_crc32c(uint32_t crc, const void *data, size_t n) {
  return hardware() ? ~by_instruction(~crc, data, n) : ds4_crc32c_tables(crc, data, n);
}

#else

uint32_t ds4_crc32c(uint32_t crc, const void *data, size_t n) { return ds4_crc32c_tables(crc, data, n); }

#endif
