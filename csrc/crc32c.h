/* CRC-32C (Castagnoli, reflected polynomial 0x82f63b78), the checksum of snapshots. */
#ifndef DS4_CRC32C_H
#define DS4_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* The checksum of n more bytes after those that gave `crc`; 0 begins. By the CPU's own instruction where it has one. */
uint32_t ds4_crc32c(uint32_t crc, const void *data, size_t n);
/* The same by tables, on every machine. */
uint32_t ds4_crc32c_tables(uint32_t crc, const void *data, size_t n);

#endif
