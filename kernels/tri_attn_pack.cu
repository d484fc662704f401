// Packs the inputs that all outer slices share a layout for, once per call:
//   bias [B, H, N, N], any strides, bf16 or fp32  ->  64x64 tiles in fragment order (README);
//   mask [B, O, N] bool, any strides              ->  one 64-bit word per key tile.
// Blocks 0 .. bias_blocks-1 write one bias tile each (through shared memory, reading along the
// faster axis); each warp of the other blocks writes one word.
// Constants: BIAS_F32.
#include "tile.cuh"

struct Params {
  const void* bias;
  void* tiles;
  const unsigned char* mask;
  u64* words;
  i64 bias_b, bias_h, bias_q, bias_k;  // strides in elements
  i64 mask_b, mask_o, mask_n;
  int n, heads, outer, key_tiles, query_tiles, bias_blocks, word_count;
};

constexpr int TILE = 64;
constexpr int THREADS = 128;

DEV float load_bias(const void* bias, i64 at) {
#if BIAS_F32
  return static_cast<const float*>(bias)[at];
#else
  return __uint_as_float(static_cast<u32>(static_cast<const u16*>(bias)[at]) << 16);
#endif
}

DEV void pack_bias(const Params& p, int block) {
  __shared__ float tile[TILE][TILE + 1];
  const int qt = block % p.query_tiles, kt = block / p.query_tiles % p.key_tiles;
  const int bh = block / p.query_tiles / p.key_tiles;
  const i64 base = (bh / p.heads) * p.bias_b + (bh % p.heads) * p.bias_h;
  const bool along_keys = p.bias_k <= p.bias_q;
#pragma unroll 8
  for (int i = threadIdx.x; i < TILE * TILE; i += THREADS) {
    const int fast = i % TILE, slow = i / TILE;
    const int r = along_keys ? slow : fast, c = along_keys ? fast : slow;
    const int q = qt * TILE + r, k = kt * TILE + c;
    float value = k < p.n ? 0.f : -INF;
    if (q < p.n && k < p.n) value = load_bias(p.bias, base + q * p.bias_q + k * p.bias_k);
    tile[r][c] = value;
  }
  __syncthreads();
  const int t = threadIdx.x, lane = t % 32, row = 16 * (t / 32);
  constexpr int PER_CHUNK = BIAS_F32 ? 4 : 8;
  constexpr int CHUNKS = 32 / PER_CHUNK;
  uint4* out = static_cast<uint4*>(p.tiles) + static_cast<i64>(block) * CHUNKS * THREADS;
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    u32 w[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = c * PER_CHUNK + j * (PER_CHUNK / 4);
      const float first = tile[row + frag_row(lane, i)][frag_col(lane, i)];
#if BIAS_F32
      w[j] = __float_as_uint(first);
#else
      w[j] = pack_bf16(first, tile[row + frag_row(lane, i + 1)][frag_col(lane, i + 1)]);
#endif
    }
    out[c * THREADS + t] = make_uint4(w[0], w[1], w[2], w[3]);
  }
}

DEV void pack_mask(const Params& p, int block) {
  const int word = block * (THREADS / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (word >= p.word_count) return;
  const int kt = word % p.key_tiles, bo = word / p.key_tiles;
  const i64 base = (bo / p.outer) * p.mask_b + (bo % p.outer) * p.mask_o;
  const int k = kt * TILE + lane;
  const bool low = k < p.n && p.mask[base + k * p.mask_n];
  const bool high = k + 32 < p.n && p.mask[base + (k + 32) * p.mask_n];
  const u32 lo = __ballot_sync(0xffffffffu, low), hi = __ballot_sync(0xffffffffu, high);
  if (lane == 0) p.words[word] = static_cast<u64>(hi) << 32 | lo;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    tri_attn_pack(const __grid_constant__ Params p) {
  const int block = blockIdx.x;
  if (block < p.bias_blocks) {
    pack_bias(p, block);
  } else {
    pack_mask(p, block - p.bias_blocks);
  }
}
