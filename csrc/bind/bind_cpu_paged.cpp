// The kernels around the paged cache and the sampler, one at a time over numpy arrays, for tests
// and benches: submodule _native.paged_kernels. bf16 arrays are uint16.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "bind/arrays.h"
#include "bind/bench_clock.h"
#include "bind/bind.h"
#include "common/aligned_memory.h"
#include "common/check.h"
#include "common/thread_pool.h"
#include "cpu/kernels.h"

namespace py = pybind11;

namespace lmi {
namespace {

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;
using Ints = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;
using Words = py::array_t<uint32_t, py::array::c_style | py::array::forcecast>;

DType cache_dtype(const std::string& name) {
  if (name == "fp32") return DType::kF32;
  LMI_CHECK(name == "bf16", "dtype is fp32 or bf16, not ", name);
  return DType::kBF16;
}

py::array empty_rows(DType dtype, int64_t num_rows, int64_t num_columns) {
  const char* name = dtype == DType::kF32 ? "float32" : "uint16";
  return py::array(py::dtype(name), {num_rows, num_columns});
}

struct PagedCache {
  PagedCache(int32_t num_layers, int32_t num_blocks, int32_t block_size, int32_t num_kv_heads,
             int32_t head_dim, const std::string& dtype, bool is_latent, std::vector<float> fixed)
      : scales(std::move(fixed)) {
    view = {nullptr,    parse_dtype(dtype), num_layers, num_blocks,
            block_size, num_kv_heads,       head_dim,   is_latent};
    view.fixed_scales = scales.empty() ? nullptr : scales.data();
    memory = AlignedMemory(view.total_bytes(), true);
    view.base = memory.data();
  }

  std::vector<float> scales;
  KvCacheView view;
  AlignedMemory memory;
};

// The arrays of a step that these kernels read.
struct PagedStep {
  PagedStep(Ints tables, int32_t block_size) : block_tables(std::move(tables)) {
    LMI_CHECK(block_tables.ndim() == 2, "block tables are [rows, max blocks]");
    view.capacity.max_seqs = static_cast<int32_t>(block_tables.shape(0));
    view.capacity.max_blocks_per_seq = static_cast<int32_t>(block_tables.shape(1));
    view.capacity.block_size = block_size;
  }

  void add(int32_t table_row, int32_t start, int32_t count) {
    const int32_t* table = block_tables.data(table_row, 0);
    const int32_t block_size = view.capacity.block_size;
    first_rows.push_back(static_cast<int32_t>(positions.size()));
    num_rows.push_back(count);
    kv_lengths.push_back(start + count);
    table_rows.push_back(table_row);
    for (int32_t position = start; position < start + count; ++position) {
      positions.push_back(position);
      slots.push_back(table[position / block_size] * block_size + position % block_size);
    }
  }

  const StepView& fill() {
    view.num_tokens = static_cast<int32_t>(positions.size());
    view.num_seqs = static_cast<int32_t>(num_rows.size());
    view.positions = positions.data();
    view.slots = slots.data();
    view.first_rows = first_rows.data();
    view.num_rows = num_rows.data();
    view.kv_lengths = kv_lengths.data();
    view.table_rows = table_rows.data();
    view.block_tables = block_tables.data();
    return view;
  }

  Ints block_tables;
  std::vector<int32_t> positions, slots, first_rows, num_rows, kv_lengths, table_rows;
  StepView view;
};

// Runs kernels: on threads, or (stride > 0) on the caller's thread in the order 0, stride, 2 stride
// modulo the number of chunks.
class KernelRunner {
 public:
  KernelRunner(const std::string& instruction_set, int32_t num_threads, int64_t stride,
               int32_t num_repeats)
      : kernels_(cpu::kernels(cpu::parse_instruction_set(instruction_set))),
        num_threads_(num_threads),
        stride_(stride),
        num_repeats_(num_repeats),
        pool_(stride > 0 ? 1 : num_threads) {
    for (int32_t i = 0; i < num_threads; ++i) scratch_.emplace_back(cpu::kScratchBytes);
  }

  double seconds = 0.0;  // of the fastest repetition
  int64_t num_chunks = 0;

  py::array rope_cache_write(const Floats& qkv, PagedCache& cache, PagedStep& step, int32_t layer,
                             int32_t num_q_heads, const Floats& cos, const Floats& sin,
                             const std::optional<Floats>& q_norm,
                             const std::optional<Floats>& k_norm, float norm_eps,
                             const std::string& q_dtype) {
    cpu::RopeCacheArgs args;
    args.qkv = qkv.data();
    args.num_q_heads = num_q_heads;
    args.cache = cache.view;
    args.layer = layer;
    args.cos = cos.data();
    args.sin = sin.data();
    args.rotary_dim = static_cast<int32_t>(2 * cos.shape(1));
    args.q_norm = q_norm ? q_norm->data() : nullptr;
    args.k_norm = k_norm ? k_norm->data() : nullptr;
    args.norm_eps = norm_eps;
    args.q_dtype = cache_dtype(q_dtype);
    args.step = &step.fill();
    py::array q = empty_rows(args.q_dtype, args.step->num_tokens,
                             static_cast<int64_t>(num_q_heads) * cache.view.head_dim);
    args.q = q.mutable_data();
    run(kernels_.rope_cache_write, args);
    return q;
  }

  py::array attention(const py::array& q, PagedCache& cache, PagedStep& step, int32_t layer,
                      int32_t num_q_heads, float scale, int32_t window, float soft_cap,
                      const std::string& y_dtype, const std::optional<Floats>& slopes) {
    LMI_CHECK((q.flags() & py::array::c_style) != 0, "q is not contiguous");
    cpu::AttentionArgs args;
    args.q = q.data();
    args.q_dtype = q.itemsize() == 4 ? DType::kF32 : DType::kBF16;
    args.num_q_heads = num_q_heads;
    args.cache = cache.view;
    args.layer = layer;
    args.scale = scale;
    args.window = window;
    args.soft_cap = soft_cap;
    args.slopes = slopes ? slopes->data() : nullptr;
    args.y_dtype = cache_dtype(y_dtype);
    args.step = &step.fill();
    const int64_t needed =
        cpu::attention_workspace_bytes(args.step->capacity, num_q_heads, cache.view);
    if (workspace_.num_bytes() < needed) workspace_ = AlignedMemory(needed);
    args.workspace = workspace_.data();
    py::array y = empty_rows(args.y_dtype, args.step->num_tokens,
                             static_cast<int64_t>(num_q_heads) * cache.view.head_dim);
    args.y = y.mutable_data();
    run(kernels_.attention, args);
    return y;
  }

  void block_copy(PagedCache& cache, Ints sources, Ints targets) {
    StepView step;
    step.num_copies = static_cast<int32_t>(sources.size());
    step.copy_src = sources.mutable_data();
    step.copy_dst = targets.mutable_data();
    run(kernels_.block_copy, cpu::BlockCopyArgs{cache.view, &step});
  }

  py::dict sample(const Floats& logits, const SamplingTable& table, Ints sampling_rows,
                  Ints positions, Ints target_ids, int32_t max_logprobs,
                  const std::map<int32_t, Words>& masks) {
    const int64_t num_rows = logits.shape(0);
    Ints ids(num_rows), ranks(num_rows), num_top(num_rows),
        top_ids({num_rows, int64_t{max_logprobs}});
    Floats logprobs(num_rows), top_logprobs({num_rows, int64_t{max_logprobs}});
    StepView step;
    step.capacity.max_logprobs = max_logprobs;
    step.num_logit_rows = static_cast<int32_t>(num_rows);
    step.sampling_rows = sampling_rows.mutable_data();
    step.sample_positions = positions.mutable_data();
    step.target_ids = target_ids.mutable_data();
    step.sampling = &table;
    step.sampled_ids = ids.mutable_data();
    step.sampled_logprobs = logprobs.mutable_data();
    step.target_ranks = ranks.mutable_data();
    step.num_top = num_top.mutable_data();
    step.top_ids = top_ids.mutable_data();
    step.top_logprobs = top_logprobs.mutable_data();
    std::vector<const uint32_t*> row_masks(num_rows);
    const std::vector<uint32_t> ready(num_rows, 1);
    for (const auto& [row, words] : masks) {
      LMI_CHECK(row >= 0 && row < num_rows && words.size() * 32 >= logits.shape(1), "mask of row ",
                row);
      row_masks[row] = words.data();
    }
    step.masks = row_masks.data();
    step.mask_ready = ready.data();
    run(kernels_.sample,
        cpu::SampleArgs{logits.data(), logits.shape(1), logits.shape(1), &step, {}});
    py::dict result;
    result["ids"] = ids;
    result["logprobs"] = logprobs;
    result["target_ranks"] = ranks;
    result["num_top"] = num_top;
    result["top_ids"] = top_ids;
    result["top_logprobs"] = top_logprobs;
    return result;
  }

 private:
  template <typename Args>
  void run(const cpu::Kernel<Args>& kernel, const Args& args) {
    seconds = 0.0;
    for (int32_t i = 0; i < num_repeats_; ++i) {
      const double start = read_clock(num_threads_);
      run_once(kernel, args);
      const double elapsed = read_clock(num_threads_) - start;
      if (i == 0 || elapsed < seconds) seconds = elapsed;
    }
  }

  template <typename Args>
  void run_once(const cpu::Kernel<Args>& kernel, const Args& args) {
    num_chunks = kernel.num_chunks(args, num_threads_);
    const auto run_chunk = [&](int64_t chunk, int32_t thread_id) {
      cpu::Scratch scratch{scratch_[thread_id].data(), scratch_[thread_id].num_bytes()};
      kernel.run(args, chunk, num_threads_, scratch);
    };
    if (stride_ == 0) {
      pool_.parallel_for(num_chunks, run_chunk);
      return;
    }
    int64_t stride = stride_;
    while (num_chunks > 0 && std::gcd(stride, num_chunks) != 1) ++stride;
    for (int64_t i = 0; i < num_chunks; ++i) run_chunk(i * stride % num_chunks, 0);
  }

  const cpu::Kernels& kernels_;
  int32_t num_threads_;
  int64_t stride_;
  int32_t num_repeats_;
  ThreadPool pool_;
  std::vector<AlignedMemory> scratch_;
  AlignedMemory workspace_;
};

template <typename T>
void read_field(const py::dict& fields, const char* name, T& target) {
  if (fields.contains(name)) target = fields[name].cast<T>();
}

SamplingTable make_sampling_table(const std::vector<py::dict>& rows, int32_t vocab_size) {
  SamplingTable table;
  table.vocab_size = vocab_size;
  for (const py::dict& fields : rows) {
    SamplingRow row;
    read_field(fields, "temperature", row.temperature);
    read_field(fields, "top_k", row.top_k);
    read_field(fields, "top_p", row.top_p);
    read_field(fields, "min_p", row.min_p);
    read_field(fields, "typical_p", row.typical_p);
    read_field(fields, "epsilon_cutoff", row.epsilon_cutoff);
    read_field(fields, "eta_cutoff", row.eta_cutoff);
    read_field(fields, "repetition_penalty", row.repetition_penalty);
    read_field(fields, "presence_penalty", row.presence_penalty);
    read_field(fields, "frequency_penalty", row.frequency_penalty);
    read_field(fields, "seed", row.seed);
    read_field(fields, "choice", row.choice);
    read_field(fields, "num_logprobs", row.num_logprobs);
    read_field(fields, "min_tokens", row.min_tokens);
    read_field(fields, "num_output", row.num_output);
    read_field(fields, "watermark_gamma", row.watermark_gamma);
    read_field(fields, "watermark_delta", row.watermark_delta);
    std::vector<TokenBias> biases;
    read_field(fields, "logit_bias", biases);
    row.biases = std::make_shared<LogitBiases>(std::move(biases), std::vector<SequenceBias>());
    read_field(fields, "banned_ids", row.banned_ids);
    read_field(fields, "min_tokens_banned_ids", row.min_tokens_banned_ids);
    read_field(fields, "prompt_reward", row.prompt_reward);
    read_field(fields, "prompt_ids", row.prompt_ids);
    read_field(fields, "length_start", row.length_penalty.start);
    read_field(fields, "length_factor", row.length_penalty.factor);
    read_field(fields, "length_ids", row.length_penalty.token_ids);
    std::vector<std::pair<int32_t, int32_t>> seen;
    read_field(fields, "seen", seen);
    for (const auto& [token_id, num_output] : seen) row.seen.push_back({token_id, num_output});
    table.rows.push_back(std::move(row));
  }
  return table;
}

struct TestSamplingTable {
  SamplingTable table;
};

}  // namespace

void bind_cpu_paged(py::module_& m) {
  py::module_ k = m.def_submodule("paged_kernels", "Paged-cache kernels, for tests and benches.");
  py::class_<PagedCache>(k, "Cache")
      .def(py::init<int32_t, int32_t, int32_t, int32_t, int32_t, std::string, bool,
                    std::vector<float>>(),
           py::kw_only(), py::arg("num_layers"), py::arg("num_blocks"), py::arg("block_size"),
           py::arg("num_kv_heads"), py::arg("head_dim"), py::arg("dtype"),
           py::arg("is_latent") = false, py::arg("fixed_scales") = std::vector<float>())
      .def_property_readonly("memory", [](py::object self) {
        const PagedCache& cache = self.cast<const PagedCache&>();
        return py::array_t<uint8_t>({cache.memory.num_bytes()}, cache.memory.data(), self);
      });
  py::class_<PagedStep>(k, "Step")
      .def(py::init<Ints, int32_t>(), py::arg("block_tables"), py::kw_only(), py::arg("block_size"))
      .def("add", &PagedStep::add, py::kw_only(), py::arg("table_row"), py::arg("start"),
           py::arg("count"));
  py::class_<TestSamplingTable>(k, "SamplingRows")
      .def(py::init([](const std::vector<py::dict>& rows, int32_t vocab_size) {
             return TestSamplingTable{make_sampling_table(rows, vocab_size)};
           }),
           py::arg("rows"), py::arg("vocab_size"));
  py::class_<KernelRunner>(k, "Runner")
      .def(py::init<std::string, int32_t, int64_t, int32_t>(), py::arg("instruction_set"),
           py::kw_only(), py::arg("num_threads") = 1, py::arg("stride") = 1,
           py::arg("num_repeats") = 1)
      .def_readonly("seconds", &KernelRunner::seconds)
      .def_readonly("num_chunks", &KernelRunner::num_chunks)
      .def("rope_cache_write", &KernelRunner::rope_cache_write, py::arg("qkv"), py::arg("cache"),
           py::arg("step"), py::kw_only(), py::arg("layer"), py::arg("num_q_heads"), py::arg("cos"),
           py::arg("sin"), py::arg("q_norm") = py::none(), py::arg("k_norm") = py::none(),
           py::arg("norm_eps") = 0.0f, py::arg("q_dtype") = "fp32")
      .def("attention", &KernelRunner::attention, py::arg("q"), py::arg("cache"), py::arg("step"),
           py::kw_only(), py::arg("layer"), py::arg("num_q_heads"), py::arg("scale"),
           py::arg("window") = 0, py::arg("soft_cap") = 0.0f, py::arg("y_dtype") = "fp32",
           py::arg("slopes") = py::none())
      .def("block_copy", &KernelRunner::block_copy, py::arg("cache"), py::arg("sources"),
           py::arg("targets"))
      .def(
          "sample",
          [](KernelRunner& runner, const Floats& logits, const TestSamplingTable& rows,
             Ints sampling_rows, Ints positions, Ints target_ids, int32_t max_logprobs,
             const std::map<int32_t, Words>& masks) {
            return runner.sample(logits, rows.table, std::move(sampling_rows), std::move(positions),
                                 std::move(target_ids), max_logprobs, masks);
          },
          py::arg("logits"), py::arg("rows"), py::kw_only(), py::arg("sampling_rows"),
          py::arg("positions"), py::arg("target_ids"), py::arg("max_logprobs"),
          py::arg("masks") = std::map<int32_t, Words>());
}

}  // namespace lmi
