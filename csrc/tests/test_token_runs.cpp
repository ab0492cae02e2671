// Token runs, against their definition.
#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "side.hpp"
#include "tests.hpp"
#include "token_runs.hpp"

namespace {

// One position after the other; faults as (side, listed, token, row), ordered by side, kind and token.
std::vector<std::vector<std::int64_t>> naive_token_runs(std::int64_t start, std::int64_t stop, std::int64_t granule,
                                                        const Side& source, const Side& destination,
                                                        std::vector<std::int64_t>& fault) {
    std::vector<std::vector<std::int64_t>> places, faults;
    for (std::int64_t p = start / granule; p < stop / granule; ++p) {
        std::vector<std::int64_t> place;
        bool both = true;
        for (const Side* side : {&source, &destination}) both = both && side->locate(p * granule) >= 0;
        if (!both) continue;
        for (const Side* side : {&source, &destination}) {
            const std::int64_t local = side->locate(p * granule) / granule, per_page = side->page_size / granule;
            const std::int64_t index = local / per_page - side->first_page, number = side == &destination;
            const bool listed = index >= 0 && index < static_cast<std::int64_t>(side->ids.size());
            const std::int64_t row = listed ? side->ids[static_cast<std::size_t>(index)] : -1;
            if (!listed || row < 0 || row >= side->num_rows) faults.push_back({number, listed, p * granule, row});
            place.insert(place.end(), {row, local % per_page});
        }
        places.push_back(place);
    }
    if (!faults.empty()) {
        fault = *std::min_element(faults.begin(), faults.end());
        return {};
    }
    std::vector<std::vector<std::int64_t>> runs;
    for (const auto& place : places) {
        if (!runs.empty()) {
            auto& last = runs.back();
            if (last[0] == place[0] && last[1] + last[4] == place[1] && last[2] == place[2] && last[3] + last[4] == place[3]) {
                ++last[4];
                continue;
            }
        }
        runs.push_back({place[0], place[1], place[2], place[3], 1});
    }
    return runs;
}

Side random_side(std::mt19937_64& random, std::int64_t granule) {
    const auto below = [&](std::uint64_t bound) { return static_cast<std::int64_t>(random() % bound); };
    Side side{{}, below(3), granule * (1 + below(4)), 8, {}, 0};
    if (random() % 4 == 0) side.first_page = 0;
    side.ids.resize(random() % 30);
    for (auto& id : side.ids) id = static_cast<std::int32_t>(random() % 20 == 0 ? below(12) - 2 : below(8));
    if (random() % 2 == 0) {
        side.period = 1 + below(20);
        const std::int64_t offset = random() % 2 == 0 ? 0 : below(20);
        side.edges = {offset, offset + 1 + below(static_cast<std::uint64_t>(side.period))};
        if (random() % 3 == 0) side.period = side.edges[1] - side.edges[0];
    } else {
        std::vector<std::pair<std::int64_t, std::int64_t>> parts;
        for (std::int64_t at = below(5); at < 60; at += below(5)) {
            const std::int64_t stop = at + 1 + below(30);
            parts.emplace_back(at, stop);
            at = stop;
        }
        std::shuffle(parts.begin(), parts.end(), random);
        for (const auto& [start, stop] : parts) side.edges.insert(side.edges.end(), {start, stop});
    }
    return side;
}

}  // namespace

void test_token_runs(std::mt19937_64& random) {
    int good = 0;
    for (int round = 0; round < 20000; ++round) {
        const std::int64_t granule = 1 + static_cast<std::int64_t>(random() % 4);
        const Side source = random_side(random, granule), destination = random_side(random, granule);
        const auto start = static_cast<std::int64_t>(random() % 40), stop = start + static_cast<std::int64_t>(random() % 40);
        std::vector<std::int64_t> fault;
        const auto expected = naive_token_runs(start, stop, granule, source, destination, fault);
        const auto found = disagg::token_runs(start, stop, granule, source.list(), destination.list());
        CHECK(found.fault.has_value() == !fault.empty());
        if (found.fault) {
            const auto& f = *found.fault;
            CHECK((std::vector<std::int64_t>{f.side, f.listed, f.token, f.row} == fault));
        }
        CHECK(found.runs.size() == expected.size());
        for (std::size_t i = 0; i < expected.size(); ++i) {
            const auto& run = found.runs[i];
            CHECK((std::vector<std::int64_t>{run.source_row, run.source_offset, run.destination_row, run.destination_offset,
                                             run.length} == expected[i]));
        }
        good += !expected.empty();
    }
    CHECK(good > 1000);
}

void test_extreme_token_runs() {
    constexpr std::int64_t k62 = std::int64_t{1} << 62;
    const Side whole{{0}, 0, k62, 1, {0, 1}, 1};
    for (const std::int64_t start : {std::int64_t{0}, k62 - 1000}) {
        const auto found = disagg::token_runs(start, start + 999, 1, whole.list(), whole.list());
        CHECK(!found.fault && found.runs.size() == 1 && found.runs[0].length == 999);
    }
    for (const Edges& edges : {Edges{0, k62 - 1}, Edges{k62 - 1, k62 + 5}, Edges{k62 - 2, k62 - 1, 0, 9}}) {
        const Side side{{0}, 0, 4, 1, edges, 0};
        disagg::token_runs(k62 - 100, k62 - 1, 1, side.list(), whole.list());
    }
    const Side rare{{0}, 0, 4, 1, {k62 - 2, k62 - 1}, k62 - 1};
    disagg::token_runs(k62 - 100, k62 - 1, 3, Side{{0}, 0, 3, 1, rare.edges, rare.period}.list(),
                       Side{whole.ids, 0, 3, 1, {0, 1}, 1}.list());
    const auto refused = [&](const Side& side, std::int64_t start, std::int64_t stop, std::int64_t granule) {
        return refuses([&] { disagg::token_runs(start, stop, granule, side.list(), whole.list()); });
    };
    CHECK(refused(whole, 0, k62, 1) && refused(whole, 3, 2, 1) && refused(whole, -1, 2, 1) && refused(whole, 0, 2, 0));
    CHECK(refused({{0}, 0, 0, 1, {0, 1}, 1}, 0, 1, 1) && refused({{0}, 0, 5, 1, {0, 1}, 1}, 0, 1, 2));
    CHECK(refused({{0}, -1, 4, 1, {0, 1}, 1}, 0, 1, 1) && refused({{0}, 0, 4, 1, {0}, 1}, 0, 1, 1));
    CHECK(refused({{0}, 0, 4, 1, {5, 5}, 0}, 0, 1, 1) && refused({{0}, 0, 4, 1, {-3, 5}, 0}, 0, 1, 1));
    CHECK(refused({{0}, 0, 4, 1, {0, 9}, 8}, 0, 1, 1) && refused({{0}, 0, 4, 1, {0, 1}, -8}, 0, 1, 1));
    CHECK(refused({{0}, 0, 4, 1, {}, 8}, 0, 1, 1) && refused({{0}, 0, 4, 1, {kMax - 1, kMax}, 0}, 0, 1, 1));
}
