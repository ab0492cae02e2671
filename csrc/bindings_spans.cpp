// Python bindings of token runs, spans, their expansion into columns, and streams.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "expand.hpp"
#include "pack.hpp"

namespace disagg::python {

namespace {

// ------------------------------------------------------------------------------------------------------------- token runs

using NewRunTable = nb::ndarray<nb::numpy, std::int64_t, nb::shape<-1, 5>>;
using Fault = std::tuple<int, bool, std::int64_t, std::int64_t>;

// One side's pages; keeps the arrays alive.
struct Pages {
    Column<std::int32_t> ids;
    Column<std::int64_t> edges;
    PageList list;

    Pages(Column<std::int32_t> ids_, std::int64_t first_page, std::int64_t page_size, std::int64_t num_rows,
          Column<std::int64_t> edges_, std::int64_t period)
        : ids(std::move(ids_)), edges(std::move(edges_)) {
        list = {view(ids), first_page, page_size, num_rows, {view(edges), period}};
    }
};

std::tuple<NewRunTable, std::optional<Fault>> find_token_runs(std::int64_t start, std::int64_t stop, std::int64_t granule,
                                                              const Pages& source, const Pages& destination) {
    auto found = std::make_unique<TokenRuns>();
    {
        const ReleaseGilIfLarge released(static_cast<std::size_t>(stop - start));
        *found = token_runs(start, stop, granule, source.list, destination.list);
    }
    std::optional<Fault> fault;
    if (found->fault) fault = Fault{found->fault->side, found->fault->listed, found->fault->token, found->fault->row};
    const std::size_t count = found->runs.size();
    auto* const data = reinterpret_cast<std::int64_t*>(found->runs.data());
    const nb::capsule owner(found.get(), [](void* p) noexcept { delete static_cast<TokenRuns*>(p); });
    found.release();
    return {NewRunTable(data, {count, 5}, owner), fault};
}

// ------------------------------------------------------------------------------------------------------------------ spans

using Strides = std::tuple<std::uint64_t, std::uint64_t>;
using Dims = std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>>;
using Formats = std::tuple<std::string, std::string, std::string>;

void make_span(Span* self, const Column<std::int64_t>& layers, const Addresses& source_bases,
               const Addresses& destination_bases, const Strides& row_strides, const Strides& token_strides, const Dims& dims,
               std::uint64_t nbytes, bool dense, const std::optional<Formats>& formats, const std::vector<float>& scales) {
    if (source_bases.shape(0) != layers.shape(0) || destination_bases.shape(0) != layers.shape(0)) {
        throw std::invalid_argument("span: expected a source base and a destination base for each layer");
    }
    const auto copied = [](const auto& column) { return std::vector(column.data(), column.data() + column.shape(0)); };
    Span span{copied(layers), copied(source_bases), copied(destination_bases), {}, {}, {}, nbytes, dense};
    span.row = {1, std::get<0>(row_strides), std::get<1>(row_strides)};
    span.token = {1, std::get<0>(token_strides), std::get<1>(token_strides)};
    for (const auto& [count, source, destination] : dims) span.dims.push_back({count, source, destination});
    if (formats) {
        span.conversion = std::apply([](const auto&... each) { return conversion(each...); }, *formats);
        span.scales = scales;
        if (scales.size() != span.layers.size()) throw std::invalid_argument("span: expected a scale for each layer");
        if (nbytes % span.conversion.destination_itemsize != 0) {
            throw std::invalid_argument("span: expected whole elements, found " + std::to_string(nbytes) + " bytes");
        }
    }
    new (self) Span(std::move(span));
}

// Spans with their runs. Holds references to both, so that the caller may change its lists meanwhile.
struct SpanRuns {
    std::vector<const Span*> spans;
    std::vector<std::span<const TokenRun>> runs;
    std::optional<std::span<const std::int64_t>> layers;
    std::vector<nb::object> held;

    SpanRuns(const nb::list& spans_, const std::vector<RunTable>& runs_, const std::optional<Column<std::int64_t>>& layers_) {
        for (const nb::handle span : spans_) {
            if (!nb::isinstance<Span>(span)) throw nb::type_error("spans: expected only Span");
            held.push_back(nb::borrow(span));
            spans.push_back(nb::inst_ptr<Span>(span));
        }
        for (const RunTable& table : runs_) {
            if (!table.is_valid()) throw nb::type_error("runs: expected only int64 tables");  // None in a list
            runs.push_back(view(table));
        }
        if (layers_) layers = view(*layers_);
    }

    // Runs times bases: a lower bound on the number of pieces.
    std::size_t num_items() const {
        std::size_t total = 0;
        for (std::size_t i = 0; i < std::min(spans.size(), runs.size()); ++i) {
            total += runs[i].size() * spans[i]->source_bases.size();
        }
        return total;
    }
};

// ---------------------------------------------------------------------------------------------------------------- columns

// Columns that one thread at a time may fill.
struct SharedColumns {
    Columns columns;
    std::atomic_flag in_use;
};

class ColumnsGuard {
  public:
    explicit ColumnsGuard(SharedColumns& columns) : columns_(columns) {
        if (columns.in_use.test_and_set()) throw std::invalid_argument("columns: another thread is filling them");
    }
    ~ColumnsGuard() { columns_.in_use.clear(); }
    ColumnsGuard(const ColumnsGuard&) = delete;
    ColumnsGuard& operator=(const ColumnsGuard&) = delete;

  private:
    SharedColumns& columns_;
};

using ReadOnlyColumn = nb::ndarray<nb::numpy, const std::uint64_t, nb::ndim<1>>;
using ReadOnlyColumns = std::tuple<ReadOnlyColumn, ReadOnlyColumn, ReadOnlyColumn>;

// Source, destination and length. The arrays keep the columns' memory alive.
ReadOnlyColumns views(const Columns& columns) {
    using Memory = std::shared_ptr<std::uint64_t[]>;
    auto memory = std::make_unique<Memory>(columns.memory());
    const nb::capsule owner(memory.get(), [](void* p) noexcept { delete static_cast<Memory*>(p); });
    memory.release();
    const auto column = [&](const std::uint64_t* data) { return ReadOnlyColumn(data, {columns.size()}, owner); };
    return {column(columns.source()), column(columns.destination()), column(columns.nbytes())};
}

ReadOnlyColumns expand_spans(const nb::list& spans, const std::vector<RunTable>& runs,
                             const std::optional<Column<std::int64_t>>& layers, std::int64_t num_threads, SharedColumns& out) {
    const SpanRuns given(spans, runs, layers);
    const ColumnsGuard guard(out);
    {
        const ReleaseGilIfLarge released(given.num_items());
        expand(given.spans, given.runs, given.layers, num_threads, out.columns);
    }
    return views(out.columns);
}

std::uint64_t count_copies(const nb::list& spans, const std::vector<RunTable>& runs,
                           const std::optional<Column<std::int64_t>>& layers) {
    const SpanRuns given(spans, runs, layers);
    const ReleaseGilIfLarge released(given.num_items());
    return num_copies(given.spans, given.runs, given.layers);
}

// ---------------------------------------------------------------------------------------------------------------- streams

void append_to_stream(Stream& self, const nb::list& spans, const std::vector<RunTable>& runs,
                      const std::optional<Column<std::int64_t>>& layers) {
    const SpanRuns given(spans, runs, layers);
    const ReleaseGilIfLarge released(given.num_items());
    self.append(given.spans, given.runs, given.layers);
}

ReadOnlyColumns stream_copies(const Stream& self, std::uint64_t offset, std::uint64_t nbytes, std::uint64_t staging) {
    Columns columns;
    {
        const ReleaseGilToWork released;
        self.copies(offset, nbytes, staging, columns);
    }
    return views(columns);
}

void bind_streams(nb::module_& m) {
    nb::class_<Stream>(m, "Stream",
                       "One side's bytes of a request, in an order that both sides know: spans, layers, runs, dims.\n\n"
                       "Holds the pieces of one layer for each shape. Memory must be mapped, which is not checked.")
        .def(
            "__init__", [](Stream* self, bool source) { new (self) Stream(source ? Side::kSource : Side::kDestination); },
            nb::kw_only(), "source"_a)
        .def_prop_ro("total", &Stream::total)
        .def_prop_ro("num_pieces", &Stream::num_pieces)
        .def_prop_ro("converts", &Stream::converts)
        .def("append", &append_to_stream, "spans"_a, "runs"_a.noconvert(), "layers"_a.noconvert().none(),
             "Add spans over their runs, from one thread, before the stream is used. ValueError as for expand.")
        .def("gather", &Stream::gather, nb::call_guard<ReleaseGilToWork>(), "offset"_a, "nbytes"_a, "staging_address"_a,
             "num_threads"_a = 1,
             "Copy bytes [offset, offset + nbytes) of the stream to the staging. IndexError: the stream is too short.")
        .def("scatter", &Stream::scatter, nb::call_guard<ReleaseGilToWork>(), "offset"_a, "nbytes"_a, "staging_address"_a,
             "num_threads"_a = 1,
             "Copy the staging to bytes [offset, offset + nbytes) of the stream. IndexError: the stream is too short.")
        .def("copies", &stream_copies, "offset"_a, "nbytes"_a, "staging_address"_a,
             "The copies that gather or scatter would make: (source, destination, nbytes). IndexError: the stream is too "
             "short.");
}

}  // namespace

void bind_spans(nb::module_& m) {
    nb::class_<Pages>(m, "PageList", "One side's pages of a request, and the tokens it owns.")
        .def(nb::init<Column<std::int32_t>, std::int64_t, std::int64_t, std::int64_t, Column<std::int64_t>, std::int64_t>(),
             "ids"_a.noconvert(), nb::kw_only(), "first_page"_a, "page_size"_a, "num_rows"_a, "edges"_a.noconvert(),
             "period"_a);
    m.def("token_runs", &find_token_runs, "start"_a, "stop"_a, "granule"_a, "source"_a, "destination"_a,
          "Positions that both sides own, as runs inside one page on each side: an int64 table\n"
          "(source row, source offset, destination row, destination offset, length), and None or the first\n"
          "fault (side, listed, token, row). With a fault the table is empty. ValueError: invalid range, page size or\n"
          "ownership.");
    nb::class_<Span>(m, "Span", "Copies of one shape; immutable.")
        .def("__init__", &make_span, "layers"_a.noconvert(), "source_bases"_a.noconvert(), "destination_bases"_a.noconvert(),
             nb::kw_only(), "row_strides"_a, "token_strides"_a, "dims"_a, "nbytes"_a, "dense"_a,
             "formats"_a.none() = nb::none(), "scales"_a = std::vector<float>{});
    nb::class_<SharedColumns>(m, "Columns", "Growing, reusable memory of three uint64 columns, for one thread at a time.")
        .def(nb::init<>())
        .def_prop_ro("capacity", [](const SharedColumns& self) { return self.columns.capacity(); });
    m.def("expand", &expand_spans, "spans"_a, "runs"_a.noconvert(), "layers"_a.noconvert().none(), "num_threads"_a, "out"_a,
          "Addresses of bases x runs x dims, with adjacent copies joined: read-only views (source, destination, nbytes) of\n"
          "`out`.\n\n"
          "The views keep their memory alive, but the next use of `out` may change it. ValueError: columns of different\n"
          "lengths, empty runs, more than 2**31 copies, or `out` in use by another thread.");
    m.def("num_copies", &count_copies, "spans"_a, "runs"_a.noconvert(), "layers"_a.noconvert().none(),
          "The number of copies that expand would give if it did not join copies of different layers or spans. ValueError as\n"
          "for expand.");
    bind_streams(m);
}

}  // namespace disagg::python
