// Copies many pieces of memory, each from one address to another, within this GPU or between it and a mapped peer GPU.
//
// The pieces form a stream of bytes, one after the other. The stream is cut into tiles of equal size. Warps take tiles by
// incrementing a counter, so the load is even for pieces of any size, and a block that starts late does less. A tile boundary
// inside a piece moves to an address where the destination is a multiple of 16.
//
// `move_pieces` takes the addresses of the pieces. `move_spans` computes them from span classes and token runs.
//
// A warp copies a piece, or the part of it in a tile, in words of the largest size (up to 16 bytes) at which source and
// destination can both be aligned. The units of a piece are: the few bytes before the first aligned word, each whole word, and
// the few bytes after the last word. A warp takes up to 32 pieces at a time, one per lane, and deals their units out to the
// lanes in turn, so that all lanes stay busy with long and short pieces alike. harness/reference_kernels.py does the same on the CPU.
//
// `move_spans` also converts numbers on their way from a pool: then bytes are counted in the destination's format.

typedef unsigned long long u64;
typedef unsigned int u32;

constexpr u32 FULL = 0xffffffffu;
constexpr int DEPTH = 4;  // units that a lane loads before its first store

struct Piece {  // the piece that one lane holds
  u64 source, destination;
  u32 nbytes, head, width_log2, units;  // nbytes: at most one tile plus 15
};

// The last i with starts[i] <= x. Requires starts[0] <= x.
__device__ __forceinline__ u32 last_at_most(const u64* starts, u32 count, u64 x) {
  u32 low = 0, high = count;
  while (high - low > 1) {
    u32 middle = (low + high) / 2;
    if (starts[middle] <= x) low = middle; else high = middle;
  }
  return low;
}

// The first i with ends[i] > x. The whole warp searches; each step divides the range by 33.
template <typename Number>
__device__ __forceinline__ u32 first_after(const Number* ends, u32 count, u64 x, u32 lane) {
  u32 low = 0, size = count;  // the answer is in [low, low + size]
  while (size > 0) {
    u32 step = (size + 32) / 33;
    u32 probe = low + step * (lane + 1) - 1;
    bool not_after = probe < low + size && ends[probe] <= x;
    u32 passed = __popc(__ballot_sync(FULL, not_after));
    u32 skip = passed * step;
    low += skip;
    size = passed == 32 ? size - skip : min(step - 1, size - min(skip, size));
  }
  return low;
}

// Bytes of a piece before stream position x. The piece occupies [begin, end) of the stream.
__device__ __forceinline__ u64 cut(u64 begin, u64 end, u64 destination, u64 x) {
  if (x <= begin) return 0;
  if (x >= end) return end - begin;
  u64 inside = x - begin;
  u64 past = (destination + inside) & 15;
  return inside > past ? inside - past : 0;
}

__device__ __forceinline__ void split(Piece& piece) {
  u32 differ = u32(piece.source ^ piece.destination) | 16;
  piece.width_log2 = __ffs(differ) - 1;
  u32 mask = (1u << piece.width_log2) - 1;
  piece.head = min((0u - u32(piece.destination)) & mask, piece.nbytes);
  u32 rest = piece.nbytes - piece.head;
  piece.units = (piece.head != 0) + (rest >> piece.width_log2) + ((rest & mask) != 0);
}

template <typename Word>
__device__ __forceinline__ void copy_word(u64 destination, u64 source) {
  *reinterpret_cast<Word*>(destination) = *reinterpret_cast<const Word*>(source);
}

// Fewer than 16 bytes, with both addresses aligned as far as their difference allows.
__device__ __noinline__ void copy_few(u64 destination, u64 source, u32 nbytes) {
  for (u32 i = 0; i < nbytes; ++i) copy_word<unsigned char>(destination + i, source + i);
}

// Copies one unit of a piece whose units are not all words of 16 bytes.
__device__ __noinline__ void copy_unit(u64 source, u64 destination, u32 nbytes, u32 head, u32 width_log2, u32 unit) {
  if (head) {
    if (unit == 0) return copy_few(destination, source, head);
    --unit;
  }
  u64 offset = head + (u64(unit) << width_log2);
  u64 to = destination + offset, from = source + offset;
  u32 left = nbytes - u32(offset), width = 1u << width_log2;
  if (left < width) return copy_few(to, from, left);
  switch (width_log2) {
    case 0: return copy_word<unsigned char>(to, from);
    case 1: return copy_word<unsigned short>(to, from);
    case 2: return copy_word<u32>(to, from);
    case 3: return copy_word<u64>(to, from);
    default: return copy_word<uint4>(to, from);
  }
}

__device__ __forceinline__ uint4 load16(u64 address) {
  uint4 word;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(address)
               : "memory");
  return word;
}

__device__ __forceinline__ void store16(u64 address, uint4 word) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(address), "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)
               : "memory");
}

// The lane whose piece contains the warp's unit `unit`: the last lane with before <= unit. Lanes without units come last.
__device__ __forceinline__ int owner_of(u32 before, u32 unit) {
  int low = 0;
#pragma unroll
  for (int step = 16; step; step >>= 1) {
    u32 there = __shfl_sync(FULL, before, low + step);
    if (there <= unit) low += step;
  }
  return low;
}

// Copies the pieces that the lanes hold. `before`: units of the preceding lanes. `total`: units of all lanes.
__device__ __forceinline__ void copy_words(const Piece& piece, u32 before, u32 total, u32 lane) {
  for (u32 base = 0; base < total; base += 32 * DEPTH) {
    u64 to[DEPTH];
    uint4 word[DEPTH];
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      u32 unit = base + i * 32 + lane;
      int owner = owner_of(before, unit);
      u64 offset = u64(unit - __shfl_sync(FULL, before, owner)) << 4;
      u64 from = __shfl_sync(FULL, piece.source, owner) + offset;
      to[i] = __shfl_sync(FULL, piece.destination, owner) + offset;
      if (unit < total) word[i] = load16(from);
    }
#pragma unroll
    for (int i = 0; i < DEPTH; ++i)
      if (base + i * 32 + lane < total) store16(to[i], word[i]);
  }
}

__device__ __noinline__ void copy_any(Piece piece, u32 before, u32 total, u32 lane) {
  for (u32 base = 0; base < total; base += 32) {
    u32 unit = base + lane;
    int owner = owner_of(before, unit);
    u32 of_piece = unit - __shfl_sync(FULL, before, owner);
    u64 source = __shfl_sync(FULL, piece.source, owner), destination = __shfl_sync(FULL, piece.destination, owner);
    u32 nbytes = __shfl_sync(FULL, piece.nbytes, owner), head = __shfl_sync(FULL, piece.head, owner);
    u32 width_log2 = __shfl_sync(FULL, piece.width_log2, owner);
    if (unit < total) copy_unit(source, destination, nbytes, head, width_log2, of_piece);
  }
}

// Copies the pieces that the lanes hold, at most one per lane.
__device__ __forceinline__ void copy_pieces(const Piece& piece, u32 lane) {
  u32 upto = piece.units;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    u32 other = __shfl_up_sync(FULL, upto, step);
    if (lane >= step) upto += other;
  }
  const u32 before = upto - piece.units, all = __shfl_sync(FULL, upto, 31);
  const bool words = piece.width_log2 == 4 && piece.head == 0 && (piece.nbytes & 15) == 0;
  if (__all_sync(FULL, words)) copy_words(piece, before, all, lane);
  else copy_any(piece, before, all, lane);
}

// ---------------------------------------------------------------------------------------------- formats of numbers

// Same arithmetic as csrc/convert.hpp. Roundings by number, as in disagg/core/formats.py.
constexpr int NEAREST = 0, UNBOUNDED = 1, TOWARD_ZERO = 2;

template <int E, int M, bool FINITE>
struct SmallFloat {
  static constexpr u32 SIZE = E + M + 1 == 8 ? 1 : 2;
  static constexpr int BIAS = (1 << (E - 1)) - 1;
  static constexpr u32 NOT_A_NUMBER = (1u << (E + M)) - 1;
  static constexpr u32 INFINITE = NOT_A_NUMBER & ~((1u << M) - 1);
  static constexpr u32 LARGEST = FINITE ? NOT_A_NUMBER - 1 : INFINITE - 1;

  static __device__ __forceinline__ float widen(u32 stored) {
    const u32 sign = stored >> (E + M), rest = stored & NOT_A_NUMBER, exponent = rest >> M, mantissa = rest & ((1u << M) - 1);
    u32 bits;
    if (FINITE ? rest == NOT_A_NUMBER : exponent == (1u << E) - 1) bits = 0x7f800000u | (mantissa << (23 - M));
    else if (exponent > 0) bits = ((exponent + 127 - BIAS) << 23) | (mantissa << (23 - M));
    else bits = __float_as_uint(float(mantissa) * __uint_as_float(u32(127 + 1 - BIAS - M) << 23));
    return __uint_as_float(bits | (sign << 31));
  }

  template <int ROUNDING>
  static __device__ __forceinline__ u32 narrow(float number) {
    const u32 bits = __float_as_uint(number), sign = (bits >> 31) << (E + M);
    u32 rest = bits & 0x7fffffffu, stored;
    constexpr u32 LEAST_NORMAL = u32(128 - BIAS) << 23;
    constexpr u32 LARGEST_AS_FLOAT = (((LARGEST >> M) + 127 - BIAS) << 23) | ((LARGEST & ((1u << M) - 1)) << (23 - M));
    if constexpr (ROUNDING == TOWARD_ZERO) {
      if (rest == 0) return 0;
      if (rest > 0x7f800000u) return LARGEST;
      if (rest >= LARGEST_AS_FLOAT) stored = LARGEST;
      else if (rest < LEAST_NORMAL) stored = u32(__uint_as_float(rest) * __uint_as_float(u32(127 - 1 + BIAS + M) << 23));
      else stored = (rest - (u32(127 - BIAS) << 23)) >> (23 - M);
    } else if (rest > 0x7f800000u) {
      stored = SIZE == 1 ? NOT_A_NUMBER : INFINITE | (1u << (M - 1));
    } else if (ROUNDING == NEAREST && rest >= LARGEST_AS_FLOAT) {
      stored = LARGEST;
    } else if (rest < LEAST_NORMAL) {
      constexpr u32 MAGIC = u32(127 + 24 - BIAS - M) << 23;
      stored = __float_as_uint(__uint_as_float(rest) + __uint_as_float(MAGIC)) - MAGIC;
    } else {
      rest += (1u << (22 - M)) - 1 + ((rest >> (23 - M)) & 1);
      stored = min((rest - (u32(127 - BIAS) << 23)) >> (23 - M), FINITE ? NOT_A_NUMBER : INFINITE);
    }
    return stored | sign;
  }
};

struct Float32 {
  static constexpr u32 SIZE = 4;
  static __device__ __forceinline__ float widen(u32 stored) { return __uint_as_float(stored); }
  template <int>
  static __device__ __forceinline__ u32 narrow(float number) { return __float_as_uint(number); }
};

struct BFloat16 {
  static constexpr u32 SIZE = 2;
  static __device__ __forceinline__ float widen(u32 stored) { return __uint_as_float(stored << 16); }
  template <int>
  static __device__ __forceinline__ u32 narrow(float number) {
    const u32 bits = __float_as_uint(number);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (bits >> 31 << 15) | 0x7fc0u;
    return (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
  }
};

using Float16 = SmallFloat<5, 10, false>;
using Float8E4M3 = SmallFloat<4, 3, true>;
using Float8E5M2 = SmallFloat<5, 2, false>;

// `number / scale`, rounded correctly. The quotient by `inverse`, the rounded `1 / scale`, is corrected by the remainder. Beyond
// 2**100 any quotient does, since it is beyond every format of 8 bits; far below their smallest number likewise.
__device__ __forceinline__ float divide(float number, float scale, float inverse) {
  const float quotient = number * inverse;
  const float corrected = __fmaf_rn(__fmaf_rn(quotient, -scale, number), inverse, quotient);
  return copysignf(fabsf(quotient) < 0x1p100f ? corrected : quotient, number);
}

template <typename From, typename To>
__device__ __forceinline__ float scaled(u32 stored, float scale, float inverse) {
  const float number = From::widen(stored);
  if constexpr (From::SIZE == 1) return number * scale;
  if constexpr (To::SIZE == 1) return inverse == 0 ? __fdiv_rn(number, scale) : divide(number, scale, inverse);
  return number;
}

// Two numbers of 8 bits. GPUs that convert to these formats do so by NEAREST; their NaN has no sign.
template <typename To, int ROUNDING>
__device__ __forceinline__ u32 narrow_two(float first, float second) {
#if __CUDA_ARCH__ >= 890
  if constexpr (ROUNDING == NEAREST) {
    unsigned short both;
    if constexpr (To::LARGEST == 0x7e) asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(second), "f"(first));
    else asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(both) : "f"(second), "f"(first));
    return both;
  }
#endif
  return To::template narrow<ROUNDING>(first) | To::template narrow<ROUNDING>(second) << 8;
}

// Converts the pieces that the lanes hold, all of whole words of 16 bytes at the destination, from aligned sources.
template <typename From, typename To, int ROUNDING>
__device__ __forceinline__ void convert_words(const Piece& piece, u32 before, u32 total, u32 lane, float scale, float inverse) {
  constexpr u32 COUNT = 16 / To::SIZE, NUM_WORDS = COUNT * From::SIZE / 4;  // numbers, and words of 4 bytes that hold them
  constexpr int AT_ONCE = NUM_WORDS >= 16 ? 1 : NUM_WORDS >= 8 ? 2 : DEPTH;
  for (u32 base = 0; base < total; base += 32 * AT_ONCE) {
    u64 to[AT_ONCE];
    uint4 words[AT_ONCE][(NUM_WORDS + 3) / 4];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const u32 unit = base + i * 32 + lane;
      const int owner = owner_of(before, unit);
      const u64 offset = unit - __shfl_sync(FULL, before, owner);
      const u64 from = __shfl_sync(FULL, piece.source, owner) + offset * (4 * NUM_WORDS);
      to[i] = __shfl_sync(FULL, piece.destination, owner) + (offset << 4);
      if (unit >= total) continue;
      if constexpr (NUM_WORDS == 1) {
        words[i][0].x = *reinterpret_cast<const u32*>(from);
      } else if constexpr (NUM_WORDS == 2) {
        const uint2 two = *reinterpret_cast<const uint2*>(from);
        words[i][0].x = two.x, words[i][0].y = two.y;
      } else {
#pragma unroll
        for (u32 j = 0; j < NUM_WORDS / 4; ++j) words[i][j] = load16(from + 16 * j);
      }
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (base + i * 32 + lane >= total) continue;
      u32 converted[4] = {0, 0, 0, 0};
      const auto number = [&](u32 j) {
        const u32 at = j * From::SIZE;
        const uint4& four = words[i][at / 16];
        const u32 word = at / 4 % 4 == 0 ? four.x : at / 4 % 4 == 1 ? four.y : at / 4 % 4 == 2 ? four.z : four.w;
        const u32 stored = From::SIZE == 4 ? word : word >> (at % 4 * 8) & ((1u << (From::SIZE % 4 * 8)) - 1);
        return scaled<From, To>(stored, scale, inverse);
      };
      if constexpr (To::SIZE == 1) {
#pragma unroll
        for (u32 j = 0; j < COUNT; j += 2) {
          converted[j / 4] |= narrow_two<To, ROUNDING>(number(j), number(j + 1)) << (j % 4 * 8);
        }
      } else {
#pragma unroll
        for (u32 j = 0; j < COUNT; ++j) {
          converted[j * To::SIZE / 4] |= To::template narrow<ROUNDING>(number(j)) << (j * To::SIZE % 4 * 8);
        }
      }
      store16(to[i], make_uint4(converted[0], converted[1], converted[2], converted[3]));
    }
  }
}

// Converts the pieces that the lanes hold, one number at a time. `piece.head`: bytes of the first number that are before the
// piece; it may also end inside a number.
template <typename From, typename To, int ROUNDING>
__device__ __forceinline__ void convert_any(const Piece& piece, u32 before, u32 total, u32 lane, float scale, float inverse) {
  for (u32 base = 0; base < total; base += 32) {
    const u32 unit = base + lane;
    const int owner = owner_of(before, unit);
    const u32 index = unit - __shfl_sync(FULL, before, owner);
    const u64 source = __shfl_sync(FULL, piece.source, owner), destination = __shfl_sync(FULL, piece.destination, owner);
    const u32 head = __shfl_sync(FULL, piece.head, owner), stop = __shfl_sync(FULL, piece.nbytes, owner) + head;
    if (unit >= total) continue;
    u32 stored = 0;
    for (u32 i = 0; i < From::SIZE; ++i)
      stored |= u32(*reinterpret_cast<const unsigned char*>(source + u64(index) * From::SIZE + i)) << (8 * i);
    const u32 converted = To::template narrow<ROUNDING>(scaled<From, To>(stored, scale, inverse));
    for (u32 i = 0; i < To::SIZE; ++i) {
      const u32 at = index * To::SIZE + i;
      if (at >= head && at < stop) *reinterpret_cast<unsigned char*>(destination - head + at) = converted >> (8 * i);
    }
  }
}

template <typename From, typename To, int ROUNDING>
__device__ __noinline__ void convert_pieces(Piece piece, u32 lane, float scale) {
  constexpr u32 LOADED = 16 / To::SIZE * From::SIZE, ALIGNED = LOADED < 16 ? LOADED : 16;
  const bool words = ((piece.destination | piece.nbytes) & 15) == 0 && piece.source % ALIGNED == 0 && piece.head == 0;
  const bool all = __all_sync(FULL, words);
  const u32 units = all ? piece.nbytes / 16 : piece.nbytes == 0 ? 0 : (piece.head + piece.nbytes + To::SIZE - 1) / To::SIZE;
  u32 upto = units;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const u32 other = __shfl_up_sync(FULL, upto, step);
    if (lane >= step) upto += other;
  }
  const u32 before = upto - units, total = __shfl_sync(FULL, upto, 31);
  // 0 if the inverse, or the remainder of a division by it, could be inexact.
  const float inverse = scale > 0x1p-100f && scale < 0x1p100f ? __frcp_rn(scale) : 0;
  if (all) convert_words<From, To, ROUNDING>(piece, before, total, lane, scale, inverse);
  else convert_any<From, To, ROUNDING>(piece, before, total, lane, scale, inverse);
}

template <typename From, typename To>
__device__ __forceinline__ void convert_into(u32 rounding, const Piece& piece, u32 lane, float scale) {
  if (rounding == NEAREST) convert_pieces<From, To, NEAREST>(piece, lane, scale);
  else if (rounding == UNBOUNDED) convert_pieces<From, To, UNBOUNDED>(piece, lane, scale);
  else convert_pieces<From, To, TOWARD_ZERO>(piece, lane, scale);
}

// The numbers of formats in `Span::formats`, in the order of `work_list.FORMATS`.
template <typename From>
__device__ __forceinline__ void convert_from(u32 to, u32 rounding, const Piece& piece, u32 lane, float scale) {
  if (to == 0) convert_pieces<From, Float32, UNBOUNDED>(piece, lane, scale);
  else if (to == 1) convert_pieces<From, BFloat16, UNBOUNDED>(piece, lane, scale);
  else if (to == 2) convert_pieces<From, Float16, UNBOUNDED>(piece, lane, scale);
  if constexpr (From::SIZE > 1) {
    if (to == 3) convert_into<From, Float8E4M3>(rounding, piece, lane, scale);
    else if (to == 4) convert_into<From, Float8E5M2>(rounding, piece, lane, scale);
  }
}

__device__ __forceinline__ void convert(u32 from, u32 to, u32 rounding, const Piece& piece, u32 lane, float scale) {
  if (from == 0) convert_from<Float32>(to, rounding, piece, lane, scale);
  else if (from == 1) convert_from<BFloat16>(to, rounding, piece, lane, scale);
  else if (from == 2) convert_from<Float16>(to, rounding, piece, lane, scale);
  else if (from == 3) convert_from<Float8E4M3>(to, rounding, piece, lane, scale);
  else convert_from<Float8E5M2>(to, rounding, piece, lane, scale);
}

// Takes the next tile for the warp and returns its number.
__device__ __forceinline__ u64 take_tile(u64* counter, u32 lane) {
  u64 number = 0;
  if (lane == 0) number = atomicAdd(counter, 1ull);
  return __shfl_sync(FULL, number, 0);
}

// ------------------------------------------------------------------------------------------------ pieces by address

// Batch layout: HEADER words, the first of which counts the tiles taken; then `count` source addresses, `count` destination
// addresses, and `count` end positions in the stream. `remote`: `num_remote` start addresses of the peer's regions, ascending,
// then one delta per region, which translates an address of the peer, in the destination column, to an address on this GPU.
constexpr int HEADER = 4;

extern "C" __global__ void __launch_bounds__(1024, 1)
    move_pieces(u64* batch, u64 count64, const u64* remote, u64 num_remote, u64 tile) {
  const u32 count = u32(count64), lane = threadIdx.x & 31;
  const u64* sources = batch + HEADER;
  const u64* destinations = sources + count;
  const u64* ends = destinations + count;
  const u64 total = ends[count - 1];
  for (;;) {
    const u64 low = take_tile(batch, lane) * tile;
    if (low >= total) return;
    const u64 high = min(low + tile, total);
    for (u32 first = first_after(ends, count, low, lane); first < count; first += 32) {
      const u32 index = first + lane;
      Piece piece = {0, 0, 0, 0, 4, 0};
      u64 begin = ~0ull;
      if (index < count) begin = index ? ends[index - 1] : 0;
      if (begin < high) {
        const u64 end = ends[index];
        u64 source = sources[index], destination = destinations[index];
        destination += remote[num_remote + last_at_most(remote, u32(num_remote), destination)];
        const u64 start = cut(begin, end, destination, low), stop = cut(begin, end, destination, high);
        piece.source = source + start;
        piece.destination = destination + start;
        piece.nbytes = u32(stop - start);
        split(piece);
      }
      copy_pieces(piece, lane);
      if (__shfl_sync(FULL, begin, 31) >= high) break;
    }
  }
}

// -------------------------------------------------------------------------------------------------- pieces by shape

// A span class, in a table that stays on the GPU. `dims` are (count, source stride, destination stride), outermost first.
// Pairs of bases begin at word `bases_at` of the table; the peer's bases are translated to addresses on this GPU. `formats` is 0
// if bytes are copied. Else its bits are 1 (always), 2 and 4: the rounding, and in each further byte: the source's format and the
// destination's; then, in 4 bits each, the logarithms of their sizes. The bits of a float, the scale of each base, begin at word `scales_at`.
struct Span {
  u64 nbytes, source_row, destination_row, source_token, destination_token, dense, num_dims, bases_at, formats, scales_at;
  __device__ const u64* dims() const { return &scales_at + 1; }
};

// A part of a request: some bases of a span class, over token runs. The stream of a part holds one base after the other. The
// stream of a base is ordered by run, then position, then step of the dims. A tile never spans two bases. Offsets from the
// start of the work list: `runs_at`, in units of 16 bytes, to (source row, source offset, destination row, destination offset)
// of each run; `prefix_at`, in units of 4 bytes, to the positions before each run and after the last; `bases_at`, in units of
// 4 bytes, to the numbers of the bases, or ALL.
struct Part {
  u64 stream_begin, base_nbytes;
  u32 span_at, num_runs, first_tile, base_tiles, base_pieces, steps, runs_at, prefix_at, bases_at, unused;
};
constexpr u32 ALL = 0xffffffffu;

// Work list layout: two words for counters, the number of parts, one unused word; then the parts, then their arrays. Counters:
// tiles taken, and blocks that are done.
constexpr int TILES = 0, DONE = 1, NUM_PARTS = 2, PARTS = 4;

// Copies bytes [limit_low, limit_high) of a work list's stream, which are in tiles [first_tile, end_tile). If `linear_source`
// or `linear_destination` is not 0, that side is packed memory that begins there. Resets the counters for the next launch. If
// the work list is in host memory, each block first copies `brought` words of 16 bytes of it to shared memory; for a work list
// on the GPU, `brought` is 0.
extern "C" __global__ void __launch_bounds__(1024, 1)
    move_spans(u64* counters, const u64* work_list, u64 brought, const u64* table, u64 first_tile, u64 end_tile, u64 tile,
               u64 limit_low, u64 limit_high, u64 linear_source, u64 linear_destination) {
  extern __shared__ uint4 near[];
  if (brought) {
    for (u32 i = threadIdx.x; i < brought; i += blockDim.x) near[i] = reinterpret_cast<const uint4*>(work_list)[i];
    __syncthreads();
    work_list = reinterpret_cast<const u64*>(near);
  }
  const u32 lane = threadIdx.x & 31, num_parts = u32(work_list[NUM_PARTS]);
  const Part* parts = reinterpret_cast<const Part*>(work_list + PARTS);
  const u32* words = reinterpret_cast<const u32*>(work_list);
  for (;;) {
    const u64 number = first_tile + take_tile(counters + TILES, lane);
    if (number >= end_tile) break;
    u32 index = 0;
    for (u32 first = 0, passed = 32; passed == 32; first += 32) {
      passed = __popc(__ballot_sync(FULL, first + lane < num_parts && parts[first + lane].first_tile <= number));
      index += passed;
    }
    const Part& part = parts[index - 1];
    const Span& span = *reinterpret_cast<const Span*>(table + part.span_at);
    const u32 ordinal = u32(number - part.first_tile) / part.base_tiles, steps = part.steps, num_runs = part.num_runs;
    const u64 stream = part.stream_begin + ordinal * part.base_nbytes, unit = span.nbytes;
    u64 low = (u32(number - part.first_tile) - ordinal * part.base_tiles) * tile, high = min(low + tile, part.base_nbytes);
    // Cut exactly at the limits, even where they are not aligned.
    const u64 least = limit_low > stream ? limit_low - stream : 0;
    low = max(low, least);
    const bool last = stream + high >= limit_high;
    if (last) high = limit_high - stream;
    const u32 base = part.bases_at == ALL ? ordinal : words[part.bases_at + ordinal];
    const u64* bases = table + span.bases_at + 2 * base;
    const u32 formats = linear_source ? 0 : u32(span.formats);  // what is unpacked has been converted
    const u32 from_log2 = formats >> 24 & 15, to_log2 = formats >> 28;
    const uint4* runs = reinterpret_cast<const uint4*>(work_list) + part.runs_at;
    const u32* prefix = words + part.prefix_at;
    const bool dense = span.dense;

    u32 run = 0, first = 0;  // the run and the index of the tile's first piece
    if (low) {
      run = first_after(prefix + 1, num_runs, low / (unit * steps), lane);
      if (dense) {
        const u64 piece = (prefix[run + 1] - prefix[run]) * unit;
        first = run * steps + u32((low - prefix[run] * unit * steps) / piece);
      } else {
        first = u32(low / unit);
      }
    }
    for (;; first += 32) {
      const u32 mine = first + lane;
      u32 found = mine / steps, step = mine - found * steps, position = 0;
      if (!dense) {  // `found` is a position here: its run is one of the next 32
        position = min(found, prefix[num_runs] - 1);
        const u32 begins_at = first / steps;
        while (run + 1 < num_runs && prefix[run + 1] <= begins_at) ++run;
        found = run + owner_of(prefix[min(run + lane, num_runs)], position);
        run = __shfl_sync(FULL, found, 31);
      }
      Piece piece = {0, 0, 0, 0, 4, 0};
      u64 begin = ~0ull;
      if (mine < part.base_pieces) {
        const u32 before = prefix[found];
        const u64 nbytes = dense ? (prefix[found + 1] - before) * unit : unit;
        begin = dense ? before * unit * steps + step * nbytes : mine * unit;
        if (begin < high) {
          const uint4 at = runs[found];
          const u32 inside = dense ? 0 : position - before;
          u64 source = bases[0] + at.x * span.source_row + (at.y + inside) * span.source_token;
          u64 destination = bases[1] + at.z * span.destination_row + (at.w + inside) * span.destination_token;
          for (u32 dim = u32(span.num_dims); dim-- > 0;) {
            const u64* d = span.dims() + 3 * dim;
            const u32 outer = step / u32(d[0]), here = step - outer * u32(d[0]);
            source += here * d[1];
            destination += here * d[2];
            step = outer;
          }
          if (linear_source) source = linear_source + (stream + begin - limit_low);
          if (linear_destination) destination = linear_destination + (stream + begin - limit_low);
          const u64 end = begin + nbytes, floor = least > begin ? least - begin : 0;
          const u64 start = max(cut(begin, end, destination, low), floor);
          const u64 stop = max(last ? min(high, end) - begin : cut(begin, end, destination, high), start);
          piece.source = source + (start >> to_log2 << from_log2);
          piece.destination = destination + start;
          piece.nbytes = u32(stop - start);
          if (formats) piece.head = u32(start) & ((1u << to_log2) - 1);
          else split(piece);
        }
      }
      if (formats) {
        convert(formats >> 8 & 255, formats >> 16 & 255, formats >> 1 & 3, piece, lane, __uint_as_float(u32(table[span.scales_at + base])));
      } else {
        copy_pieces(piece, lane);
      }
      if (__shfl_sync(FULL, begin, 31) >= high) break;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0 && atomicAdd(counters + DONE, 1ull) == gridDim.x - 1) counters[TILES] = counters[DONE] = 0;
}

// ---------------------------------------------------------------------------------------------------------- digests

// Same arithmetic as csrc/digest.hpp, which gives the reasons.
__device__ __forceinline__ u64 mix(u64 x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

__device__ __forceinline__ u64 weight(u64 key, u64 coordinate) { return mix(key + (coordinate + 1) * 0x9E3779B97F4A7C15ull) | 1; }

// Adds the sum of each layer of a box to `by_layer`, and the sum of each run to the run's place in `by_row`. `words`: the
// layers; their bases; (count, stride, first coordinate, key) of each inner axis, innermost last; the positions before each run
// and after the last; (row, offset, place, first coordinate) of each run. `inner`: units of `unit` bytes per position; a warp
// takes `chunk` of them at a time.
extern "C" __global__ void __launch_bounds__(256)
    digest_box(const u64* words, u64 num_layers, u64 num_runs, u64 num_axes, u64 inner, u64 chunk, u64 row_stride,
               u64 token_stride, u64 unit, u64 layer_key, u64 token_key, u64* by_layer, u64* by_row) {
  const u32 lane = threadIdx.x & 31;
  const u64* bases = words + num_layers;
  const u64* axes = bases + num_layers;
  const u64* prefix = axes + 4 * num_axes;
  const u64* runs = prefix + num_runs + 1;
  const u64 positions = prefix[num_runs], chunks = (inner + chunk - 1) / chunk, items = num_layers * positions * chunks;
  const u64 warps = u64(gridDim.x) * (blockDim.x / 32);
  for (u64 item = (u64(blockIdx.x) * blockDim.x + threadIdx.x) / 32; item < items; item += warps) {
    const u64 part = item % chunks, position = item / chunks % positions, layer = item / chunks / positions;
    const u32 run = last_at_most(prefix, u32(num_runs), position);
    const u64 inside = position - prefix[run];
    const u64 at = bases[layer] + runs[4 * run] * row_stride + (runs[4 * run + 1] + inside) * token_stride;
    u64 found = 0;
    for (u64 i = part * chunk + lane; i < min(inner, (part + 1) * chunk); i += 32) {
      u32 rest = u32(i);
      u64 address = at, product = 1;
      for (u32 axis = u32(num_axes); axis-- > 0;) {
        const u64* a = axes + 4 * axis;
        const u32 outer = rest / u32(a[0]), here = rest - outer * u32(a[0]);
        address += here * a[1];
        product *= weight(a[3], a[2] + here);
        rest = outer;
      }
      u32 value;
      if (unit == 1) value = *reinterpret_cast<const unsigned char*>(address);
      else if (unit == 2) value = *reinterpret_cast<const unsigned short*>(address);
      else value = *reinterpret_cast<const u32*>(address);
      found += value * product;
    }
#pragma unroll
    for (int step = 16; step; step >>= 1) found += __shfl_down_sync(FULL, found, step);
    if (lane == 0) {
      const u64 sum = found * weight(token_key, runs[4 * run + 3] + inside) * weight(layer_key, words[layer]);
      atomicAdd(by_layer + layer, sum);
      atomicAdd(by_row + runs[4 * run + 2], sum);
    }
  }
}
