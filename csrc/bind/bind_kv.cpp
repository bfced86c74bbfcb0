// The block pool, the block tables and blocks in files.
#include <string_view>

#include "bind/bind.h"
#include "bind/ids.h"
#include "bind/owned_where_made.h"
#include "common/check.h"
#include "kv/block_file.h"
#include "kv/block_pool.h"
#include "kv/block_tables.h"
#include "kv/block_writer.h"

namespace py = pybind11;

namespace lmi {
namespace {

py::bytes to_bytes(const PrefixHash& hash) {
  const auto bytes = prefix_hash_to_bytes(hash);
  return py::bytes(bytes.data(), bytes.size());
}

std::string_view view(const py::bytes& bytes) { return static_cast<std::string_view>(bytes); }

std::vector<PrefixHash> hashes_from_python(const py::sequence& hashes) {
  std::vector<PrefixHash> result;
  result.reserve(hashes.size());
  for (const py::handle item : hashes) {
    result.push_back(prefix_hash_from_bytes(view(item.cast<py::bytes>())));
  }
  return result;
}

py::list hash_blocks_to_python(const BlockPool& pool, py::handle token_ids, const py::bytes& parent,
                               const py::bytes& extra) {
  const PrefixHash start = view(parent).empty() ? chain_seed(pool.hash_key(), view(extra))
                                                : prefix_hash_from_bytes(view(parent));
  py::list result;
  for (const PrefixHash& hash :
       hash_blocks(pool.hash_key(), start, ids_from_python(token_ids), pool.block_size())) {
    result.append(to_bytes(hash));
  }
  return result;
}

py::object allocate(BlockPool& pool, int32_t num_blocks) {
  const auto block_ids = pool.allocate(num_blocks);
  if (!block_ids) return py::none();
  return ids_to_python(*block_ids);
}

void bind_block_pool(py::module_& m) {
  py::class_<BlockPool>(m, "BlockPool")
      .def(py::init([](int32_t num_blocks, int32_t block_size, const py::bytes& secret) {
             return std::make_unique<BlockPool>(num_blocks, block_size,
                                                hash_key_from_bytes(view(secret)));
           }),
           py::arg("num_blocks"), py::arg("block_size"), py::arg("secret"))
      .def_property_readonly("num_blocks", &BlockPool::num_blocks)
      .def_property_readonly("block_size", &BlockPool::block_size)
      .def_property_readonly("num_free", &BlockPool::num_free)
      .def_property_readonly("num_ever_used", &BlockPool::num_ever_used)
      .def_property_readonly("num_used", &BlockPool::num_used)
      .def_property_readonly("num_cached", &BlockPool::num_cached)
      .def_property_readonly("num_available", &BlockPool::num_available)
      .def("allocate", &allocate, py::arg("num_blocks"))
      .def(
          "free",
          [](BlockPool& pool, py::handle block_ids) { pool.free(ids_from_python(block_ids)); },
          py::arg("block_ids"))
      .def(
          "add_ref",
          [](BlockPool& pool, py::handle block_ids) { pool.add_ref(ids_from_python(block_ids)); },
          py::arg("block_ids"))
      .def("ref_count", &BlockPool::ref_count, py::arg("block_id"))
      .def("hash_blocks", &hash_blocks_to_python, py::arg("token_ids"),
           py::arg("parent") = py::bytes(), py::arg("extra") = py::bytes())
      .def(
          "find",
          [](const BlockPool& pool, const py::bytes& block_hash) {
            return pool.find(prefix_hash_from_bytes(view(block_hash)));
          },
          py::arg("block_hash"))
      .def(
          "acquire_prefix",
          [](BlockPool& pool, const py::sequence& hashes) {
            return ids_to_python(pool.acquire_prefix(hashes_from_python(hashes)));
          },
          py::arg("hashes"))
      .def(
          "publish",
          [](BlockPool& pool, int32_t block_id, const py::bytes& block_hash) {
            pool.publish(block_id, prefix_hash_from_bytes(view(block_hash)));
          },
          py::arg("block_id"), py::arg("block_hash"))
      .def("clear_cache", &BlockPool::clear_cache)
      .def("check_integrity", &BlockPool::check_integrity);
}

void bind_block_tables(py::module_& m) {
  py::class_<BlockTables>(m, "BlockTables")
      .def(py::init<int32_t, int32_t>(), py::arg("max_seqs"), py::arg("max_blocks_per_seq"))
      .def(
          "set",
          [](BlockTables& tables, int32_t row, py::handle block_ids) {
            tables.set(row, ids_from_python(block_ids));
          },
          py::arg("row"), py::arg("block_ids"))
      .def(
          "append",
          [](BlockTables& tables, int32_t row, py::handle block_ids) {
            tables.append(row, ids_from_python(block_ids));
          },
          py::arg("row"), py::arg("block_ids"))
      .def("clear", &BlockTables::clear, py::arg("row"))
      .def(
          "row",
          [](const BlockTables& tables, int32_t row) { return ids_to_python(tables.row(row)); },
          py::arg("row"));
}

py::list take_outcomes(BlockWriter& writer) {
  py::list outcomes;
  for (auto& [name, error] : writer.take_outcomes()) outcomes.append(py::make_tuple(name, error));
  return outcomes;
}

bool read_block_from_file(const std::string& path, const py::bytes& key, const std::string& name,
                          const py::buffer& content) {
  const HashKey words = hash_key_from_bytes(view(key));
  const py::buffer_info info = content.request(/*writable=*/true);
  auto* bytes = static_cast<uint8_t*>(info.ptr);
  BlockFileState state;
  {
    const py::gil_scoped_release release;
    state = read_block_file(path, words, name, bytes, info.size * info.itemsize);
  }
  if (state != BlockFileState::kUnreadable) return state == BlockFileState::kWhole;
  PyErr_SetFromErrnoWithFilename(PyExc_OSError, path.c_str());
  throw py::error_already_set();
}

void bind_block_files(py::module_& m) {
  m.def("block_file_bytes", &block_file_bytes, py::arg("block_bytes"));
  m.def("read_block_file", &read_block_from_file, py::arg("path"), py::arg("key"), py::arg("name"),
        py::arg("content"));
  // The memory of blocks that wait is the caller's, of `memory`.
  py::class_<BlockWriter, OwnedWhereMade<BlockWriter>>(m, "BlockWriter")
      .def(py::init([](BlockPool& pool, const py::object& /*memory*/, const std::string& directory,
                       const py::bytes& key, int64_t block_bytes) {
             return OwnedWhereMade<BlockWriter>(
                 new BlockWriter(pool, directory, hash_key_from_bytes(view(key)), block_bytes));
           }),
           py::arg("pool"), py::arg("memory"), py::arg("directory"), py::arg("key"),
           py::arg("block_bytes"), py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def(
          "write",
          [](BlockWriter& writer, const std::string& name, const py::buffer& content) {
            const py::buffer_info info = content.request();
            const auto* bytes = static_cast<const uint8_t*>(info.ptr);
            writer.write(name, std::vector<uint8_t>(bytes, bytes + info.size * info.itemsize));
          },
          py::arg("name"), py::arg("content"))
      .def("remove", &BlockWriter::remove, py::arg("name"))
      .def("give_up", &BlockWriter::give_up, py::arg("name"))
      .def("take_outcomes", &take_outcomes)
      .def("close", &BlockWriter::close, py::arg("timeout_s"),
           py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_kv(py::module_& m) {
  bind_block_pool(m);
  bind_block_tables(m);
  bind_block_files(m);
}

}  // namespace lmi
