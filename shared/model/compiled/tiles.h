/* Tiles of AMX: a left one of 16 rows of 32 values times a right one of 32 rows of 16, whose rows are interleaved in
   pairs, is added to one of 16 x 16 floats. Only a thread that has begun may use them. */

#if USES_TILES
#define TILE_INPUTS 32
/* GCC does not know that loading a tile reads memory. No store moves over this. */
#define STORES_BEFORE_TILES(memory) __asm__ volatile("" : : "r"(memory) : "memory")

/* Not _tile_loadconfig: GCC 12 believes that it reads eight bytes, and may leave out what is stored in the others. */
#ifndef LOAD_TILE_SHAPE /* a test has its own */
#define LOAD_TILE_SHAPE(shape) __asm__ volatile("ldtilecfg %0" : : "m"(shape))
#endif

static void begin_tiles(void) {
  struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } shape = {.palette = 1};
  for (int i = 0; i < 8; i++) shape.row_bytes[i] = CACHE_LINE, shape.rows[i] = 16;
  LOAD_TILE_SHAPE(shape);
}
static void end_tiles(void) { _tile_release(); }
#else
static void begin_tiles(void) {}
static void end_tiles(void) {}
#endif
