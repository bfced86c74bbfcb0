// Weights and the KV cache.
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <string_view>

#include "bind/arrays.h"
#include "bind/bind.h"
#include "common/checksum.h"
#include "cpu/finite.h"
#include "graph/linear_weight.h"
#include "kv/block_writer.h"
#include "kv/kv_cache.h"

namespace py = pybind11;

namespace lmi {
namespace {

// The data of fp32 [num_outputs, a number per row that it says].
const float* row_numbers(const py::handle& source, int64_t num_outputs, int64_t& num_columns) {
  const auto numbers = py::cast<py::array>(source);
  check_matrix(numbers, "a part's scales");
  num_columns = numbers.shape(1);
  LMI_CHECK(array_dtype(numbers) == DType::kF32 && numbers.shape(0) == num_outputs,
            "scales are fp32, a row for each of ", num_outputs, " outputs");
  return static_cast<const float*>(numbers.data());
}

// (bytes, scales) of codes of floats, e4m3 where the packed format isn't one; or (codes, scales,
// zero points) in the packed format itself.
cpu::LinearPart scaled_part(const py::tuple& source, const py::array& bytes, DType format) {
  LMI_CHECK(bytes.dtype().kind() == 'u' && bytes.itemsize() == 1, "codes are uint8");
  const DType dtype = cpu::has_float_codes(format) ? format : DType::kE4M3;
  cpu::LinearPart part{bytes.data(), dtype, bytes.shape(0)};
  part.scales = row_numbers(source[1], part.num_outputs, part.num_scales);
  if (source.size() == 3) {
    LMI_CHECK(format == DType::kI8 || format == DType::kI4, "codes can't become ",
              dtype_name(format));
    part.dtype = format;
    int64_t num_zeros = 0;
    part.zeros = row_numbers(source[2], part.num_outputs, num_zeros);
    LMI_CHECK(num_zeros == part.num_scales, part.num_scales, " scales and ", num_zeros,
              " zero points");
    return part;
  }
  const cpu::FloatCodes codes = cpu::float_codes(dtype);
  const int64_t num_inputs = bytes.shape(1) * 8 / codes.num_bits;
  const int64_t num_blocks = (num_inputs + codes.num_inputs - 1) / codes.num_inputs;
  LMI_CHECK(part.num_scales == 1 || part.num_scales == num_blocks, "scales are fp32 [",
            part.num_outputs, ", 1 or ", num_blocks, "]");
  return part;
}

cpu::LinearPart linear_part(const py::object& source, DType format, int64_t& num_inputs) {
  const bool is_scaled = py::isinstance<py::tuple>(source);
  const auto matrix = py::cast<py::array>(is_scaled ? py::cast<py::tuple>(source)[0] : source);
  check_matrix(matrix, "a weight's part");
  const cpu::BlockFormat blocks = cpu::block_format(format);
  const bool is_of_blocks = blocks.num_inputs != 0;
  if (is_of_blocks) {
    LMI_CHECK(!is_scaled && matrix.itemsize() == 1 && matrix.shape(1) % blocks.num_bytes == 0,
              "rows of ", dtype_name(format), " are blocks of ", blocks.num_bytes, " bytes");
  }
  int64_t own_inputs =
      is_of_blocks ? matrix.shape(1) / blocks.num_bytes * blocks.num_inputs : matrix.shape(1);
  if (is_scaled && cpu::float_codes(format).num_bits == 4) own_inputs *= 2;
  LMI_CHECK(num_inputs == 0 || own_inputs == num_inputs, "parts have ", num_inputs, " and ",
            own_inputs, " inputs");
  num_inputs = own_inputs;
  if (is_of_blocks) return {matrix.data(), format, matrix.shape(0)};
  if (is_scaled) return scaled_part(py::cast<py::tuple>(source), matrix, format);
  return {matrix.data(), array_dtype(matrix), matrix.shape(0)};
}

using Files = std::vector<std::shared_ptr<const MappedFile>>;

// What each part's memory is of; none if one of them isn't of a file, or not of this type.
Files files_of(const std::vector<py::object>& parts, DType dtype) {
  Files files;
  for (const py::object& part : parts) {
    const bool is_array = py::isinstance<py::array>(part);
    if (!is_array || array_dtype(py::cast<py::array>(part)) != dtype) return {};
    py::object owner = part;
    while (py::isinstance<py::array>(owner)) owner = owner.attr("base");
    if (!py::isinstance<MappedFile>(owner)) return {};
    files.push_back(owner.cast<std::shared_ptr<MappedFile>>());
  }
  return files;
}

std::unique_ptr<LinearWeight> pack(const std::vector<py::object>& parts, const std::string& format,
                                   bool gated, int32_t group_size, const std::string& rounding,
                                   const std::string& level, int32_t num_threads,
                                   int64_t num_experts, bool behind) {
  // Every level reads the same order, but one has sums of its own for what isn't packed.
  const auto set =
      level.empty() ? cpu::default_instruction_set() : cpu::parse_instruction_set(level);
  LMI_CHECK(!parts.empty(), "a weight needs at least one part");
  std::vector<cpu::LinearPart> sources;
  int64_t num_inputs = 0;
  const cpu::LinearFormat target{parse_dtype(format), group_size,
                                 cpu::parse_row_rounding(rounding)};
  for (const py::object& part : parts) {
    sources.push_back(linear_part(part, target.dtype, num_inputs));
  }
  const bool can_wait = behind && num_experts == 1 && target.dtype == DType::kBF16 &&
                        set != cpu::InstructionSet::kAmx;
  Files files = can_wait ? files_of(parts, DType::kBF16) : Files();
  const py::gil_scoped_release release;
  return std::make_unique<LinearWeight>(sources, num_inputs, gated, target, num_threads,
                                        num_experts, std::move(files));
}

FloatArray unpack(LinearWeight& weight) {
  weight.finish_packing(1);
  const cpu::PackedLinear& packed = weight.packed();
  FloatArray result({packed.num_experts * packed.num_outputs, packed.num_inputs});
  cpu::PackedLinear expert = packed;
  for (int64_t i = 0; i < packed.num_experts; ++i) {
    expert.data = static_cast<const uint8_t*>(packed.data) + i * packed.expert_bytes;
    cpu::unpack_linear(expert, result.mutable_data() + i * packed.num_outputs * packed.num_inputs);
  }
  if (packed.input_order == nullptr) return result;
  FloatArray in_order({packed.num_outputs, packed.num_inputs});
  for (int64_t row = 0; row < packed.num_outputs; ++row) {
    for (int64_t i = 0; i < packed.num_inputs; ++i) {
      in_order.mutable_at(row, packed.input_order[i]) = result.at(row, i);
    }
  }
  return in_order;
}

std::unique_ptr<LinearWeight> read(std::shared_ptr<MappedFile> file, int64_t offset,
                                   int64_t num_bytes, uint64_t checksum, int64_t num_outputs,
                                   int64_t num_inputs, const std::string& format, bool gated,
                                   int32_t group_size, const std::string& rounding,
                                   int32_t num_threads, int64_t num_experts) {
  const cpu::LinearFormat target{parse_dtype(format), group_size,
                                 cpu::parse_row_rounding(rounding)};
  const LinearShape shape{num_outputs, num_inputs, gated, target, num_experts};
  const py::gil_scoped_release release;
  return std::make_unique<LinearWeight>(
      shape, PackedSlice{std::move(file), offset, num_bytes, checksum}, num_threads);
}

py::array_t<uint8_t> packed_bytes(const py::object& self) {
  auto& weight = self.cast<LinearWeight&>();
  weight.finish_packing(1);
  py::array_t<uint8_t> array = array_view<uint8_t>({weight.num_bytes()}, weight.data(), self);
  array.attr("setflags")(py::arg("write") = false);
  return array;
}

uint64_t packed_checksum(LinearWeight& weight) {
  const py::gil_scoped_release release;
  weight.finish_packing(1);
  return checksum(weight.data(), weight.num_bytes());
}

// Equal for weights that take the same quantised rows.
std::optional<std::string> row_format(const LinearWeight& weight) {
  if (!weight.packed().takes_quantized_rows()) return std::nullopt;
  const cpu::PackedLinear& packed = weight.packed();
  std::string format = std::string(cpu::row_rounding_name(packed.rounding)) + ", summed over " +
                       std::to_string(packed.group_size);
  if (packed.input_order != nullptr) {
    const auto num_bytes = static_cast<int64_t>(packed.num_inputs * sizeof(int32_t));
    const auto* bytes = reinterpret_cast<const uint8_t*>(packed.input_order);
    format += ", in the order " + std::to_string(checksum(bytes, num_bytes));
  }
  return format;
}

void bind_linear_weight(py::module_& m) {
  py::class_<LinearWeight>(m, "LinearWeight")
      .def_static("pack", &pack, py::arg("parts"), py::kw_only(), py::arg("format"),
                  py::arg("gated") = false, py::arg("group_size") = 0,
                  py::arg("rounding") = "outliers", py::arg("instruction_set") = "",
                  py::arg("num_threads") = 0, py::arg("num_experts") = 1, py::arg("behind") = false)
      .def_static("read", &read, py::kw_only(), py::arg("file"), py::arg("offset"),
                  py::arg("num_bytes"), py::arg("checksum"), py::arg("num_outputs"),
                  py::arg("num_inputs"), py::arg("format"), py::arg("gated") = false,
                  py::arg("group_size") = 0, py::arg("rounding") = "outliers",
                  py::arg("num_threads") = 0, py::arg("num_experts") = 1)
      .def(
          "order_inputs",
          [](LinearWeight& w, const py::array_t<int32_t, py::array::c_style>& order) {
            w.order_inputs({order.data(), order.data() + order.size()});
          },
          py::arg("order"))
      .def_readonly_static("layout_version", &cpu::kPackedLayoutVersion)
      .def_property_readonly("num_outputs",
                             [](const LinearWeight& w) { return w.packed().num_outputs; })
      .def_property_readonly("num_experts",
                             [](const LinearWeight& w) { return w.packed().num_experts; })
      .def_property_readonly("num_inputs",
                             [](const LinearWeight& w) { return w.packed().num_inputs; })
      .def_property_readonly("format",
                             [](const LinearWeight& w) { return dtype_name(w.packed().dtype); })
      .def_property_readonly("group_size",
                             [](const LinearWeight& w) { return w.packed().group_size; })
      .def_property_readonly(
          "rounding",
          [](const LinearWeight& w) { return cpu::row_rounding_name(w.packed().rounding); })
      .def_property_readonly("row_format", &row_format)
      .def_property_readonly("num_bytes", &LinearWeight::num_bytes)
      .def_property_readonly("is_finite", &LinearWeight::is_finite)
      .def_property_readonly("is_packed", &LinearWeight::is_packed)
      .def("pack_piece", &LinearWeight::pack_piece, py::arg("num_threads"),
           py::call_guard<py::gil_scoped_release>())
      .def("packed", &packed_bytes)
      .def("checksum", &packed_checksum)
      .def("unpack", &unpack);
}

bool is_finite(const py::array& values) {
  LMI_CHECK((values.flags() & py::array::c_style) != 0, "values are not contiguous");
  const DType dtype = array_dtype(values);
  const void* data = values.data();
  const int64_t count = values.size();
  const py::gil_scoped_release release;
  return cpu::all_finite(dtype, data, count);
}

KvCacheView cache_shape(int32_t num_layers, int32_t num_blocks, int32_t block_size,
                        int32_t num_kv_heads, int32_t head_dim, const std::string& dtype,
                        bool is_latent) {
  return {.base = nullptr,
          .dtype = parse_dtype(dtype),
          .num_layers = num_layers,
          .num_blocks = num_blocks,
          .block_size = block_size,
          .num_kv_heads = num_kv_heads,
          .head_dim = head_dim,
          .is_latent = is_latent};
}

py::tuple read_block(const KvCache& cache, int32_t layer, int32_t block) {
  const KvCacheView& view = cache.view();
  LMI_CHECK(layer >= 0 && layer < view.num_layers, "layer ", layer);
  LMI_CHECK(block >= 0 && block < view.num_blocks, "block ", block);
  const std::vector<py::ssize_t> shape{view.block_size, view.num_kv_heads, view.head_dim};
  FloatArray keys(shape);
  FloatArray values(shape);
  const auto element = [&](const uint8_t* base, int64_t index, int32_t token, int part) {
    if (view.dtype == DType::kF32) return reinterpret_cast<const float*>(base)[index];
    if (view.dtype == DType::kBF16) {
      return bf16_to_float(reinterpret_cast<const bf16_t*>(base)[index]);
    }
    if (view.dtype == DType::kE4M3 || view.dtype == DType::kE5M2) {
      const float scale = view.fixed_scales == nullptr ? 1.0f : view.fixed_scales[2 * layer + part];
      return scale * (view.dtype == DType::kE4M3
                          ? kE4M3Values.at[base[index]]
                          : f16_to_float(static_cast<uint16_t>(base[index] << 8)));
    }
    const float* scales = reinterpret_cast<const float*>(base + view.scale_offset());
    return scales[token] * static_cast<float>(reinterpret_cast<const int8_t*>(base)[index]);
  };
  for (int32_t token = 0; token < view.block_size; ++token) {
    for (int32_t head = 0; head < view.num_kv_heads; ++head) {
      for (int32_t dim = 0; dim < view.head_dim; ++dim) {
        keys.mutable_at(token, head, dim) =
            element(view.key(layer, block, head), view.key_element(token, dim), token, 0);
        values.mutable_at(token, head, dim) =
            view.is_latent
                ? keys.at(token, head, dim)
                : element(view.value(layer, block, head), view.value_element(token, dim), token, 1);
      }
    }
  }
  return py::make_tuple(keys, values);
}

// The memory of a block's content, the bytes of one layer after the other, which a caller has.
uint8_t* block_content(const KvCacheView& view, int32_t block_id, const py::buffer_info& content) {
  LMI_CHECK(block_id >= 0 && block_id < view.num_blocks, "block ", block_id, " of ",
            view.num_blocks);
  const int64_t num_bytes = content.size * content.itemsize;
  LMI_CHECK(num_bytes == view.num_layers * view.block_bytes(), "a block has ",
            view.num_layers * view.block_bytes(), " bytes, not ", num_bytes);
  return static_cast<uint8_t*>(content.ptr);
}

void copy_block_out(const KvCache& cache, int32_t block_id, const py::buffer& target) {
  const KvCacheView& view = cache.view();
  const py::buffer_info info = target.request(/*writable=*/true);
  uint8_t* bytes = block_content(view, block_id, info);
  for (int32_t layer = 0; layer < view.num_layers; ++layer) {
    std::memcpy(bytes + layer * view.block_bytes(), view.key(layer, block_id, 0),
                view.block_bytes());
  }
}

void copy_block_in(const KvCache& cache, int32_t block_id, const py::buffer& content) {
  const KvCacheView& view = cache.view();
  const py::buffer_info info = content.request();
  const uint8_t* bytes = block_content(view, block_id, info);
  for (int32_t layer = 0; layer < view.num_layers; ++layer) {
    std::memcpy(view.key(layer, block_id, 0), bytes + layer * view.block_bytes(),
                view.block_bytes());
  }
}

void bind_kv_cache(py::module_& m) {
  py::class_<KvCache>(m, "KvCache")
      .def(py::init([](int32_t num_layers, int32_t num_blocks, int32_t block_size,
                       int32_t num_kv_heads, int32_t head_dim, const std::string& dtype,
                       bool is_latent, std::vector<float> fixed_scales) {
             return std::make_unique<KvCache>(cache_shape(num_layers, num_blocks, block_size,
                                                          num_kv_heads, head_dim, dtype, is_latent),
                                              std::move(fixed_scales));
           }),
           py::kw_only(), py::arg("num_layers"), py::arg("num_blocks"), py::arg("block_size"),
           py::arg("num_kv_heads"), py::arg("head_dim"), py::arg("dtype"),
           py::arg("is_latent") = false, py::arg("fixed_scales") = std::vector<float>())
      .def_static(
          "block_bytes",
          [](int32_t num_layers, int32_t block_size, int32_t num_kv_heads, int32_t head_dim,
             const std::string& dtype, bool is_latent) {
            return cache_shape(num_layers, 1, block_size, num_kv_heads, head_dim, dtype, is_latent)
                .total_bytes();
          },
          py::kw_only(), py::arg("num_layers"), py::arg("block_size"), py::arg("num_kv_heads"),
          py::arg("head_dim"), py::arg("dtype"), py::arg("is_latent") = false)
      .def_property_readonly("head_dim", [](const KvCache& c) { return c.view().head_dim; })
      .def_property_readonly("num_bytes", &KvCache::num_bytes)
      .def_property_readonly(
          "bytes_per_block",
          [](const KvCache& cache) { return cache.view().num_layers * cache.view().block_bytes(); })
      .def(
          "lay_pages_ahead",
          [](KvCache& cache, int32_t num_used) { cache.pages_ahead().follow(num_used); },
          py::arg("num_used"))
      .def("read", &read_block, py::arg("layer"), py::arg("block_id"))
      .def("copy_out", &copy_block_out, py::arg("block_id"), py::arg("target"))
      .def("copy_in", &copy_block_in, py::arg("block_id"), py::arg("content"))
      .def(
          "write_out",
          [](const KvCache& cache, BlockWriter& writer, const std::string& name, int32_t block_id) {
            writer.write(name, cache.view(), block_id);
          },
          py::arg("writer"), py::arg("name"), py::arg("block_id"));
}

}  // namespace

void bind_weight(py::module_& m) {
  bind_linear_weight(m);
  m.def("is_finite", &is_finite, py::arg("values"));
  bind_kv_cache(m);
}

}  // namespace lmi
