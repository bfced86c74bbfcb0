// The device layer (device.cuh) on NVIDIA hardware, sm_80 and newer.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "cuda/device.cuh"

namespace lmi::cuda {

// ---- numbers

__device__ inline float float_of_bits(uint32_t bits) { return __uint_as_float(bits); }

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(bf16 value) {
  return __uint_as_float(static_cast<uint32_t>(value.bits) << 16);
}
__device__ inline float to_float(f16 value) { return __half2float(__ushort_as_half(value.bits)); }

template <typename T>
__device__ inline T from_float(float value);
template <>
__device__ inline float from_float<float>(float value) {
  return value;
}
template <>
__device__ inline bf16 from_float<bf16>(float value) {
  return {__bfloat16_as_ushort(__float2bfloat16_rn(value))};
}
template <>
__device__ inline f16 from_float<f16>(float value) {
  return {__half_as_ushort(__float2half_rn(value))};
}
// To the nearest of -127 .. 127.
template <>
__device__ inline i8 from_float<i8>(float value) {
  return {static_cast<uint8_t>(__float2int_rn(fminf(fmaxf(value, -127.0f), 127.0f)))};
}
// Numbers beyond the largest become that; what isn't finite becomes NaN. Instructions of sm_89 and
// newer, arithmetic of the toolkit's header before.
__device__ inline uint8_t float8_bits(float value, __nv_fp8_interpretation_t kind) {
  constexpr uint8_t kNan = 0x7f;
  return isfinite(value) ? __nv_cvt_float_to_fp8(value, __NV_SATFINITE, kind) : kNan;
}
template <>
__device__ inline e4m3 from_float<e4m3>(float value) {
  return {float8_bits(value, __NV_E4M3)};
}
template <>
__device__ inline e5m2 from_float<e5m2>(float value) {
  return {float8_bits(value, __NV_E5M2)};
}

// Two numbers in a register, the first in the lower half.
template <typename T>
__device__ inline uint32_t pack_pair(float low, float high);
template <>
__device__ inline uint32_t pack_pair<bf16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ inline uint32_t pack_pair<f16>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// a - b of both halves, rounded.
template <typename T>
__device__ inline uint32_t subtract_pairs(uint32_t a, uint32_t b);
template <>
__device__ inline uint32_t subtract_pairs<bf16>(uint32_t a, uint32_t b) {
  const __nv_bfloat162 difference = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                            *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<const uint32_t*>(&difference);
}
template <>
__device__ inline uint32_t subtract_pairs<f16>(uint32_t a, uint32_t b) {
  const __half2 difference =
      __hsub2(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
  return *reinterpret_cast<const uint32_t*>(&difference);
}

// A pair of T of two codes, the first in the lower half.
template <typename T, typename Code>
__device__ inline uint32_t widen_pair(uint32_t codes) {
  constexpr auto kKind = std::is_same_v<Code, e4m3> ? __NV_E4M3 : __NV_E5M2;
  const __half2_raw pair =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), kKind);
  if constexpr (std::is_same_v<T, f16>) {
    return static_cast<uint32_t>(pair.x) | static_cast<uint32_t>(pair.y) << 16;
  } else {
    return pack_pair<T>(to_float(f16{pair.x}), to_float(f16{pair.y}));
  }
}

// value & mask | bits, by one instruction: compilers take two where both are constants.
__device__ inline uint32_t masked_or(uint32_t value, uint32_t mask, uint32_t bits) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(value), "r"(mask), "r"(bits));
  return result;
}

// Bytes of a (0 .. 3) and b (4 .. 7), as the selector's lowest four digits say.
__device__ inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  return __byte_perm(a, b, selector);
}

// The same pointer, as one number: compilers would add the terms of its sum where it is used.
__device__ inline const uint8_t* summed(const uint8_t* pointer) {
  asm("" : "+l"(pointer));
  return pointer;
}

// A number that the compiler knows nothing of: what a loop computes of it, it computes every time.
__device__ inline int unknown(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

__device__ inline float max_of(float a, float b) { return fmaxf(a, b); }
// A product that no sum is fused with.
__device__ inline float product_of(float a, float b) { return __fmul_rn(a, b); }
__device__ inline float inverse_sqrt(float value) { return 1.0f / sqrtf(value); }
__device__ inline float exp_of(float value) { return expf(value); }
__device__ inline float erf_of(float value) { return erff(value); }
// To 2 units in the last place or so; results too small for a normal number are 0.
__device__ inline float exp2_of(float value) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(value));
  return power;
}
__device__ inline float log2_of(float value) { return log2f(value); }
// To 2 units in the last place; 0 where the divisor is above 2^126.
__device__ inline float quotient_of(float a, float b) { return __fdividef(a, b); }

// ---- threads

// Until all that the stream's earlier kernels wrote is there, and then lets the next kernel start.
// What every thread of a kernel does before it touches global memory; with programmatic dependent
// launch (launch.cuh) a kernel's blocks come while those of the one before are still at work.
__device__ inline void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Starts to bring the kPrefetchBytes around there into the cache; what they hold doesn't matter
// yet.
__device__ inline void prefetch(const void* source) {
  asm volatile("prefetch.global.L2 [%0];" : : "l"(source));
}

__device__ inline void block_barrier() { __syncthreads(); }
__device__ inline void warp_barrier() { __syncwarp(); }

template <typename T>
__device__ inline T shuffle_xor(T value, int distance) {
  return __shfl_xor_sync(0xffffffffu, value, distance);
}

template <typename T>
__device__ inline T shuffle(T value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}

// From that lane of each group of kWidth neighbours, for the group.
template <int kWidth, typename T>
__device__ inline T shuffle_among(T value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane, kWidth);
}

__device__ inline bool any_of_warp(bool is_so) { return __any_sync(0xffffffffu, is_so) != 0; }

// Of 32 bits: additions of 64 bits in shared memory are loops of compare-and-swap. The value
// before.
template <typename T>
__device__ inline T atomic_add(T* target, T value) {
  static_assert(sizeof(T) == sizeof(uint32_t));
  return atomicAdd(target, value);
}

// A block's threads call the first before a barrier, one of them the second after it: what they
// wrote is there for those who come to the same counter later, and call the third. The value
// before.
__device__ inline void publish_writes() { __threadfence(); }
__device__ inline int32_t arrive(int32_t* counter) { return atomicAdd(counter, 1); }
__device__ inline void see_writes(const int32_t*) { __threadfence(); }

// Past the multiprocessor's own cache, which may have what was there before.
__device__ inline float load_fresh(const float* source) { return __ldcg(source); }
__device__ inline Vector<float, 4> load_fresh(const Vector<float, 4>* source) {
  const float4 four = __ldcg(reinterpret_cast<const float4*>(source));
  return {{four.x, four.y, four.z, four.w}};
}

// The block's dynamic shared memory.
__device__ inline uint8_t* shared_memory() {
  extern __shared__ __align__(128) uint8_t lmi_cuda_shared[];
  return lmi_cuda_shared;
}

// ---- copies from global to shared memory that go on in the background

// 16, 8 or 4 bytes, or as many zeros and no read if not is_valid.
template <int kBytes = 16>
__device__ inline void copy_async(void* target, const void* source, bool is_valid) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(target));
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(address), "l"(source), "r"(is_valid ? 16 : 0)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 :
                 : "r"(address), "l"(source), "n"(kBytes), "r"(is_valid ? kBytes : 0)
                 : "memory");
  }
}
__device__ inline void end_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most so many of this thread's youngest groups are under way.
template <int kNumPending>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" : : "n"(kNumPending) : "memory");
}

// ---- matrices; the layouts are in fragment.h

// Four 8 x 8 matrices of 16-bit elements, whose rows lane 8 m + r points to for row r of matrix m.
__device__ inline void load_matrices(uint32_t (&words)[4], const void* row) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}
// The same, each matrix transposed.
__device__ inline void load_transposed(uint32_t (&words)[4], const void* row) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

// c += a b: m16n8k16.
template <typename T>
__device__ inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1);
template <>
__device__ inline void multiply_add<bf16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                          uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ inline void multiply_add<f16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c += a b of signed bytes, in 32 bits: m16n8k32.
__device__ inline void multiply_add_bytes(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                          uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two e4m3 codes, in the upper bytes of the halves, as a pair of fp16: their bits below the sign,
// moved by one, are the number over 256, also where it has no leading one; only NaN's are 1.875.
__device__ inline uint32_t widen_upper_e4m3(uint32_t codes) {
  constexpr uint32_t k256 = 0x5c005c00;
  const uint32_t small = (codes & 0x80008000u) | (codes >> 1 & 0x3f803f80u);
  const uint32_t is_nan = ((small & 0x3f803f80u) + 0x00800080u) >> 14 & 0x00010001u;
  uint32_t pair;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(small), "r"(k256));
  return pair | is_nan * 0x7e00u;
}

// The lower two and the upper two of four e4m3 codes as pairs of fp16.
__device__ inline void widen_e4m3(uint32_t codes, uint32_t& low, uint32_t& high) {
#if __CUDA_ARCH__ >= 890
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(low), "=r"(high)
      : "r"(codes));
#else
  // The header's own conversion has a branch for each code, which fills kernels with spills.
  low = widen_upper_e4m3(permute_bytes(codes, 0, 0x1404));
  high = widen_upper_e4m3(permute_bytes(codes, 0, 0x3424));
#endif
}

// c += a b of e4m3: m16n8k32. Where mma.sync has no such product, before sm_89 and on sm_90, the
// same numbers are multiplied as fp16, exactly: both operands may take K in any common order, so a
// word's lower and upper halves are two products'. (For sm_90 the compiler would do so too, but sum
// up outside of the tensor cores.)
__device__ inline void multiply_add_e4m3(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
#if __CUDA_ARCH__ >= 890 && __CUDA_ARCH__ != 900
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  uint32_t rows[2][4];
  uint32_t columns[2][2];
  widen_e4m3(b0, columns[0][0], columns[1][0]);
  widen_e4m3(b1, columns[0][1], columns[1][1]);
#pragma unroll
  for (int i = 0; i < 4; ++i) widen_e4m3(a[i], rows[0][i], rows[1][i]);
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    multiply_add<f16>(c, rows[part], columns[part][0], columns[part][1]);
  }
#endif
}

}  // namespace lmi::cuda
