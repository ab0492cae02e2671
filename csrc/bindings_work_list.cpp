// Python bindings of the work lists that GPU kernels read.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "work_list.hpp"

namespace disagg::python {

namespace {

// The sizes of span classes.
struct SpanSizes {
    std::vector<SpanSize> sizes;

    SpanSizes(const Addresses& steps, const Addresses& nbytes, const Addresses& num_bases, const Column<bool>& dense) {
        if (nbytes.shape(0) != steps.shape(0) || num_bases.shape(0) != steps.shape(0) || dense.shape(0) != steps.shape(0)) {
            throw std::invalid_argument("span classes: expected columns of one length");
        }
        for (std::size_t i = 0; i < steps.shape(0); ++i) {
            sizes.push_back({steps.data()[i], nbytes.data()[i], num_bases.data()[i], dense.data()[i]});
        }
    }
};

// A work list; keeps the arrays of its parts alive.
struct HeldWorkList {
    using Part = std::tuple<std::size_t, std::optional<Column<std::int64_t>>, RunTable>;
    std::vector<Part> held;
    WorkList list;

    HeldWorkList(const SpanSizes& sizes, std::vector<Part> parts) : held(std::move(parts)), list(sizes.sizes, views()) {}

    std::vector<WorkPart> views() const {
        std::vector<WorkPart> found;
        for (const auto& [span, bases, runs] : held) {
            if (!runs.is_valid()) throw nb::type_error("runs: expected int64 tables");  // None in a tuple
            found.push_back({span, std::nullopt, view(runs)});
            if (bases) found.back().bases = view(*bases);
        }
        return found;
    }
};

}  // namespace

void bind_work_lists(nb::module_& m) {
    nb::class_<SpanSizes>(m, "SpanSizes", "How much one position of each span class moves, as columns.")
        .def(nb::init<Addresses, Addresses, Addresses, Column<bool>>(), "steps"_a.noconvert(), "nbytes"_a.noconvert(),
             "num_bases"_a.noconvert(), "dense"_a.noconvert());
    nb::class_<HeldWorkList>(
        m, "WorkList",
        "A request over span classes, in parts (span class, indices of its bases or None for all, token runs).\n\n"
        "ValueError: an unknown span class, a run without positions, or 2**64 bytes and more.")
        .def(nb::init<const SpanSizes&, std::vector<HeldWorkList::Part>>(), "sizes"_a, "parts"_a.noconvert())
        .def_prop_ro("num_pieces", [](const HeldWorkList& self) { return self.list.num_pieces(); })
        .def_prop_ro("total_nbytes", [](const HeldWorkList& self) { return self.list.total_nbytes(); })
        .def_prop_ro("num_words", [](const HeldWorkList& self) { return self.list.num_words(); })
        .def(
            "encode",
            [](HeldWorkList& self, const Column<std::int64_t>& at, std::uint64_t tile,
               const MutableColumn<std::uint64_t>& out) { return self.list.encode(view(at), tile, view(out)); },
            "at"_a.noconvert(), "tile"_a, "out"_a.noconvert(),
            "Write the list as the kernel reads it, up to num_words words, in tiles of `tile` bytes. Span class i begins at\n"
            "word at[i]. Returns the number of bytes written. ValueError: `out` or `at` too short, or too many pieces or "
            "tiles.")
        .def(
            "tiles", [](const HeldWorkList& self, std::uint64_t low, std::uint64_t high) { return self.list.tiles(low, high); },
            "low"_a, "high"_a,
            "The tiles [first, end) that hold bytes [low, high) of the stream, once encoded. ValueError: there are none.");
}

}  // namespace disagg::python
