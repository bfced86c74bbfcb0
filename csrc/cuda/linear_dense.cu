// Dense matrix products of any number of rows: cuBLASLt's, found by its heuristic once per shape;
// of shapes that are known before there are steps, the fastest of the first few that it names.
#include "cuda/linear_dense.h"

#include <dlfcn.h>

#include <array>
#include <cmath>
#include <map>
#include <mutex>
#include <set>
#include <tuple>

#include "cuda/cublaslt.h"
#include "cuda/launch.cuh"
#include "cuda/runtime.cuh"

namespace lmi::cuda {
namespace {

constexpr int kCandidates = 4;       // that are timed
constexpr int kTimedRuns = 3;        // of which the shortest counts
constexpr size_t kMaxShapes = 4096;  // then the oldest knowledge is dropped, all of it

// Outputs, inputs, dtypes of operands and results, whether there is a bias.
using WeightShape = std::tuple<int32_t, int32_t, int32_t, int32_t, bool>;
// And rows, the stride of results, bytes of workspace, alignment.
using Shape = std::tuple<WeightShape, int32_t, int32_t, int64_t, uint32_t>;

// The bytes, a power of two up to 256, that the matrices and the bias all start on a multiple of:
// some algorithms want so many.
uint32_t alignment_of(const LmiLinearDense& args) {
  uintptr_t bits = 256;
  for (const void* start : {args.x, args.weight, static_cast<const void*>(args.bias),
                            static_cast<const void*>(args.y)}) {
    bits |= reinterpret_cast<uintptr_t>(start);
  }
  return static_cast<uint32_t>(bits & -bits);
}

WeightShape weight_shape_of(const LmiLinearDense& args) {
  return {args.num_outputs, args.num_inputs, args.dtype, args.y_dtype, args.bias != nullptr};
}

Shape shape_of(const LmiLinearDense& args) {
  return {weight_shape_of(args), args.num_rows, args.y_stride, args.workspace_bytes,
          alignment_of(args)};
}

// cuBLASLt's names of what a product has and is.
struct Types {
  int operand;
  int result;
  int compute;
  int scale;
};

Types types_of(const LmiLinearDense& args) {
  using namespace cublaslt;
  if (args.dtype == LMI_I8) return {kInt8, kInt32, kCompute32I, kInt32};
  const int result = args.y_dtype == LMI_BF16 ? kBFloat16 : kFloat32;
  return {args.dtype == LMI_E4M3 ? kFloat8E4M3 : kBFloat16, result, kCompute32F, kFloat32};
}

int32_t fail_at(const char* what, int status) {
  return fail(std::string("linear_dense: ") + what + " of cuBLASLt returned status " +
              std::to_string(status));
}

// The description of one shape's product, and how cuBLASLt wants to do it. A row-major matrix is a
// column-major one transposed: y^T [outputs, rows] = weight^T^T x^T.
class DenseProduct {
 public:
  DenseProduct(const DenseProduct&) = delete;
  DenseProduct& operator=(const DenseProduct&) = delete;
  explicit DenseProduct(const cublaslt::Functions& functions) : functions_(functions) {}

  ~DenseProduct() {
    for (const cublaslt::Layout layout : {weight_, x_, y_}) {
      if (layout != nullptr) (void)functions_.destroy_layout(layout);
    }
    if (description_ != nullptr) (void)functions_.destroy_description(description_);
  }

  // Whether it can be run.
  bool has_algorithm() const { return num_found_ > 0; }

  int32_t prepare(cublaslt::Handle handle, const LmiLinearDense& args) {
    const Types types = types_of(args);
    const auto rows = static_cast<uint64_t>(args.num_rows);
    const auto outputs = static_cast<uint64_t>(args.num_outputs);
    const auto inputs = static_cast<uint64_t>(args.num_inputs);
    if (const int status =
            functions_.create_description(&description_, types.compute, types.scale)) {
      return fail_at("the description", status);
    }
    if (const int status = set(cublaslt::kTransposeA, cublaslt::kTransposed)) {
      return fail_at("the transposition", status);
    }
    if (args.bias != nullptr) {
      int status = set(cublaslt::kEpilogue, cublaslt::kEpilogueBias);
      if (status == 0) status = set(cublaslt::kBiasPointer, args.bias);
      if (status != 0) return fail_at("the bias", status);
    }
    const int type = types.operand;
    int status = functions_.create_layout(&weight_, type, inputs, outputs, args.num_inputs);
    if (status == 0) status = functions_.create_layout(&x_, type, inputs, rows, args.num_inputs);
    if (status == 0) {
      status = functions_.create_layout(&y_, types.result, outputs, rows, args.y_stride);
    }
    return status == 0 ? find_algorithm(handle, args) : fail_at("a layout", status);
  }

  // Keeps the fastest of the algorithms, once; the operands may be anything. One that fails is
  // none.
  void choose(cublaslt::Handle handle, const LmiLinearDense& args) {
    if (is_chosen_ || num_found_ < 2 || args.x == nullptr || args.weight == nullptr) return;
    is_chosen_ = true;
    float least_ms = INFINITY;
    size_t fastest = 0;
    for (size_t id = 0; id < static_cast<size_t>(num_found_); ++id) {
      chosen_ = id;
      int32_t status = multiply(handle, args, nullptr);
      for (int run = 0; status == kOk && run < kTimedRuns; ++run) {
        float own_ms = INFINITY;
        status = runtime::measure([&] { return multiply(handle, args, nullptr); }, &own_ms);
        if (status == kOk && own_ms < least_ms) {
          least_ms = own_ms;
          fastest = id;
        }
      }
    }
    chosen_ = fastest;
  }

  int32_t run(cublaslt::Handle handle, const LmiLinearDense& args, void* stream) {
    return runtime::enqueue(
        stream, [this, handle, args, stream] { return multiply(handle, args, stream); });
  }

 private:
  int32_t multiply(cublaslt::Handle handle, const LmiLinearDense& args, void* stream) {
    const int32_t whole = 1;
    const float one = 1.0f;
    const void* factor = &one;
    if (args.dtype == LMI_I8) factor = &whole;
    const uint32_t zero = 0;  // of either type
    if (args.bias != nullptr) {
      if (const int status = set(cublaslt::kBiasPointer, args.bias)) {
        return fail_at("the bias", status);
      }
    }
    const int status =
        functions_.multiply(handle, description_, factor, args.weight, weight_, args.x, x_, &zero,
                            args.y, y_, args.y, y_, &found_[chosen_].algorithm, args.workspace,
                            static_cast<size_t>(args.workspace_bytes), stream);
    return status == 0 ? kOk : fail_at("the product", status);
  }

  template <typename Value>
  int set(int attribute, const Value& value) {
    return functions_.set_description(description_, attribute, &value, sizeof(value));
  }

  int32_t find_algorithm(cublaslt::Handle handle, const LmiLinearDense& args) {
    cublaslt::Preference preference = nullptr;
    if (const int status = functions_.create_preference(&preference)) {
      return fail_at("the preference", status);
    }
    int status = set_preferences(preference, args);
    if (status == 0) {
      status = functions_.find_algorithms(handle, description_, weight_, x_, y_, y_, preference,
                                          kCandidates, found_.data(), &num_found_);
    }
    (void)functions_.destroy_preference(preference);
    if (status != 0) num_found_ = 0;
    if (has_algorithm()) return kOk;
    return fail_at("the heuristic", status == 0 ? found_[0].status : status);
  }

  int set_preferences(cublaslt::Preference preference, const LmiLinearDense& args) const {
    const auto bytes = static_cast<uint64_t>(args.workspace_bytes);
    int status =
        functions_.set_preference(preference, cublaslt::kMaxWorkspaceBytes, &bytes, sizeof(bytes));
    const uint32_t alignment = alignment_of(args);
    for (int which = cublaslt::kMinAlignmentA; which <= cublaslt::kMinAlignmentD; ++which) {
      if (status != 0) break;
      status = functions_.set_preference(preference, which, &alignment, sizeof(alignment));
    }
    return status;
  }

  const cublaslt::Functions& functions_;
  cublaslt::Description description_ = nullptr;
  cublaslt::Layout weight_ = nullptr;
  cublaslt::Layout x_ = nullptr;
  cublaslt::Layout y_ = nullptr;
  std::array<cublaslt::Heuristic, kCandidates> found_ = {};  // the most promising first
  int num_found_ = 0;
  size_t chosen_ = 0;
  bool is_chosen_ = false;
};

// The opened library. Its handle belongs to the device that is current at the first product.
class Cublaslt {
 public:
  // Never destroyed: the driver may be gone when the process ends.
  static Cublaslt& instance() {
    static auto* one = new Cublaslt;
    return *one;
  }

  int32_t open(const char* path) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_open_) return kOk;
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return fail(std::string("cuBLASLt: ") + dlerror());
    const char* missing = nullptr;
    const auto find = [&](const char* name, auto& function) {
      void* symbol = dlsym(library, name);
      if (symbol == nullptr) missing = name;
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
    };
    find("cublasLtCreate", functions_.create);
    find("cublasLtMatmulDescCreate", functions_.create_description);
    find("cublasLtMatmulDescDestroy", functions_.destroy_description);
    find("cublasLtMatmulDescSetAttribute", functions_.set_description);
    find("cublasLtMatrixLayoutCreate", functions_.create_layout);
    find("cublasLtMatrixLayoutDestroy", functions_.destroy_layout);
    find("cublasLtMatmulPreferenceCreate", functions_.create_preference);
    find("cublasLtMatmulPreferenceDestroy", functions_.destroy_preference);
    find("cublasLtMatmulPreferenceSetAttribute", functions_.set_preference);
    find("cublasLtMatmulAlgoGetHeuristic", functions_.find_algorithms);
    find("cublasLtMatmul", functions_.multiply);
    if (missing != nullptr) {
      (void)dlclose(library);
      return fail(std::string("cuBLASLt: ") + path + " has no " + missing);
    }
    is_open_ = true;
    return kOk;
  }

  // By linear_tiled where there is no algorithm.
  int32_t multiply(const LmiLinearDense& args, void* stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    DenseProduct* product = nullptr;
    if (const int32_t status = find_product(args, &product)) return status;
    return product->has_algorithm() ? product->run(handle_, args, stream)
                                    : lmi_cuda_linear_tiled(&args, stream);
  }

  int32_t find_algorithm(const LmiLinearDense& args, bool* is_there) {
    const std::lock_guard<std::mutex> lock(mutex_);
    DenseProduct* product = nullptr;
    if (const int32_t status = find_product(args, &product)) return status;
    *is_there = *is_there && product->has_algorithm();
    return kOk;
  }

  int32_t prepare(const LmiLinearDense& args) {
    const std::lock_guard<std::mutex> lock(mutex_);
    DenseProduct* product = nullptr;
    if (const int32_t status = find_product(args, &product)) return status;
    product->choose(handle_, args);
    return kOk;
  }

 private:
  // Of a shape without an algorithm too, so that it isn't asked for again.
  int32_t find_product(const LmiLinearDense& args, DenseProduct** product) {
    if (!is_open_) return fail("linear_dense: cuBLASLt has not been opened");
    if (handle_ == nullptr) {
      if (const int status = functions_.create(&handle_)) return fail_at("the handle", status);
    }
    const Shape shape = shape_of(args);
    auto found = products_.find(shape);
    if (found == products_.end()) {
      if (products_.size() >= kMaxShapes) products_.clear();
      found = products_.try_emplace(shape, functions_).first;
      if (found->second.prepare(handle_, args) != kOk) tell(args, error_text());
    }
    *product = &found->second;
    return kOk;
  }

  void tell(const LmiLinearDense& args, const std::string& reason) {
    if (!told_.insert(weight_shape_of(args)).second) return;
    add_notice("products of " + std::to_string(args.num_rows) + " rows, " +
               std::to_string(args.num_inputs) + " inputs and " + std::to_string(args.num_outputs) +
               " outputs run in a plain kernel, and so may others of the same weight: " + reason);
  }

  std::mutex mutex_;
  bool is_open_ = false;
  cublaslt::Functions functions_ = {};
  cublaslt::Handle handle_ = nullptr;
  std::map<Shape, DenseProduct> products_;
  std::set<WeightShape> told_;  // to have no algorithm for some number of rows
};

}  // namespace

int32_t prepare_linear_dense(const LmiLinearDense& args) {
  return Cublaslt::instance().prepare(args);
}

int32_t find_dense_algorithm(const LmiLinearDense& args, bool* is_there) {
  return Cublaslt::instance().find_algorithm(args, is_there);
}

int32_t multiply_dense(const LmiLinearDense& args, void* stream) {
  return Cublaslt::instance().multiply(args, stream);
}

}  // namespace lmi::cuda

using namespace lmi::cuda;

int32_t lmi_cuda_open_cublaslt(const char* path) { return Cublaslt::instance().open(path); }

int32_t lmi_cuda_linear_dense(const LmiLinearDense* args, void* stream) {
  if (const int32_t status = check_bf16("linear_dense", args->dtype)) return status;
  if (!is_aligned(args->bias)) return fail("linear_dense: the bias must start on 16 bytes");
  if (args->y_dtype != LMI_F32 && (args->y_dtype != LMI_BF16 || args->bias != nullptr)) {
    return fail("linear_dense: results of element type " + std::to_string(args->y_dtype) +
                "; 0 (fp32), and 1 (bf16) without a bias can be had");
  }
  if (args->num_rows == 0 || args->num_outputs == 0) return kOk;
  return Cublaslt::instance().multiply(*args, stream);
}
