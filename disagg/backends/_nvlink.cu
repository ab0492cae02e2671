// Copies many pieces of memory, each from one address to another, between this GPU and another that is mapped here.
//
// The pieces, one behind the other, are a stream of bytes. Warps take tiles of that stream, of equal size, by a counter, so
// work is even whatever the sizes of the pieces, and a block that starts late does less. A tile that begins or ends inside a
// piece cuts it where the destination is a multiple of 16.
//
// A piece, or a part of one, is copied in words of the largest size (16 bytes at most) at which source and destination can
// both be aligned: a few bytes up to the first such boundary, whole words, a few bytes after the last. These are its units.
// Up to 32 pieces are taken together, one per lane, and their units are dealt out to the lanes in turn, so that lanes are
// busy whether pieces are long or short. Mirrored for the CPU in disagg/testing/twins_gpu.py.

typedef unsigned long long u64;
typedef unsigned int u32;

constexpr u32 FULL = 0xffffffffu;
constexpr int DEPTH = 4;  // units that a lane loads before it stores the first

struct Piece {  // what one lane holds
  u64 source, destination;
  u32 nbytes, head, width_log2, units;  // nbytes: at most a tile and 15 more
};

// The last i with starts[i] <= x; starts[0] <= x.
__device__ __forceinline__ u32 last_at_most(const u64* starts, u32 count, u64 x) {
  u32 low = 0, high = count;
  while (high - low > 1) {
    u32 middle = (low + high) / 2;
    if (starts[middle] <= x) low = middle; else high = middle;
  }
  return low;
}

// The first i with ends[i] > x, found by the whole warp: 33 parts in each step.
__device__ __forceinline__ u32 first_after(const u64* ends, u32 count, u64 x, u32 lane) {
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

// Where position x of the stream cuts a piece that is there in [begin, end): bytes of the piece before the cut.
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

// Unit number `unit` of a piece whose units are not all words of 16 bytes.
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

// The lane whose piece has unit number `unit` of all: the last with before <= unit. Lanes without units come last.
__device__ __forceinline__ int owner_of(u32 before, u32 unit) {
  int low = 0;
#pragma unroll
  for (int step = 16; step; step >>= 1) {
    u32 there = __shfl_sync(FULL, before, low + step);
    if (there <= unit) low += step;
  }
  return low;
}

// Copy the pieces that the lanes hold; `before` counts the units of the lanes before, `total` those of all.
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

// What a side's regions are, to the GPU: `count` first addresses, ascending; as many ends; and as many differences, each to
// be added to an address in that region to have it here.
struct Regions {
  const u64* table;
  u32 count;
  __device__ const u64* ends() const { return table + count; }
  __device__ const u64* deltas() const { return table + 2 * count; }
};

__device__ __forceinline__ bool inside(const Regions& regions, u64 address, u64 nbytes) {
  if (regions.count == 0 || address < regions.table[0]) return false;
  const u64 end = regions.ends()[last_at_most(regions.table, regions.count, address)];
  return address <= end && nbytes <= end - address;
}

// A batch: HEADER words, then `count` source addresses, destination addresses, and ends of the pieces in the stream.
// The header: tiles taken; pieces refused (counted in the first part of a batch only); blocks that have checked; one spare.
constexpr int HEADER = 4, TILES = 0, CHECKED = 2;
constexpr u64 GOOD = 1, BAD = 2;

// Whether every piece lies in the regions of its side: `refused` counts those that do not. The last block, where `verdict`
// is given, writes GOOD or BAD there, in host memory. `remote_is_source`: which column has the peer's addresses.
extern "C" __global__ void __launch_bounds__(256)
    check_pieces(u64* batch, u64 count, const u64* local_table, u64 num_local, const u64* remote_table, u64 num_remote,
                 u64 remote_is_source, u64* refused, volatile u64* verdict) {
  const Regions local = {local_table, u32(num_local)}, remote = {remote_table, u32(num_remote)};
  const u64* sources = batch + HEADER;
  const u64* destinations = sources + count;
  const u64* ends = destinations + count;
  bool good = true;
  for (u64 i = blockIdx.x * u64(blockDim.x) + threadIdx.x; i < count; i += u64(gridDim.x) * blockDim.x) {
    const u64 nbytes = ends[i] - (i ? ends[i - 1] : 0);
    good = good && inside(remote_is_source ? remote : local, sources[i], nbytes);
    good = good && inside(remote_is_source ? local : remote, destinations[i], nbytes);
  }
  if (!good) atomicAdd(refused, 1ull);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0 && atomicAdd(batch + CHECKED, 1ull) == gridDim.x - 1 && verdict) {
    *verdict = atomicAdd(refused, 0ull) ? BAD : GOOD;
    __threadfence_system();
  }
}

// Copies a part of a batch, unless any of the batch's pieces was refused.
extern "C" __global__ void __launch_bounds__(1024, 1)
    move_pieces(u64* batch, u64 count64, const u64* remote_table, u64 num_remote, u64 remote_is_source, const u64* refused,
                u64 tile) {
  if (*refused) return;
  const Regions regions = {remote_table, u32(num_remote)};
  const u32 count = u32(count64), lane = threadIdx.x & 31;
  const u64* sources = batch + HEADER;
  const u64* destinations = sources + count;
  const u64* ends = destinations + count;
  const u64 total = ends[count - 1];
  for (;;) {
    u64 number = 0;
    if (lane == 0) number = atomicAdd(batch + TILES, 1ull);
    number = __shfl_sync(FULL, number, 0);
    const u64 low = number * tile;
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
        u64& remote = remote_is_source ? source : destination;
        remote += regions.deltas()[last_at_most(regions.table, regions.count, remote)];
        const u64 start = cut(begin, end, destination, low), stop = cut(begin, end, destination, high);
        piece.source = source + start;
        piece.destination = destination + start;
        piece.nbytes = u32(stop - start);
        split(piece);
      }
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
      if (__shfl_sync(FULL, begin, 31) >= high) break;
    }
  }
}
