// One side's pages, which the tests of token runs and of digests share.
#pragma once

#include <cstdint>
#include <vector>

#include "token_runs.hpp"

using Ids = std::vector<std::int32_t>;
using Edges = std::vector<std::int64_t>;

struct Side {
    Ids ids;
    std::int64_t first_page, page_size, num_rows;
    Edges edges;
    std::int64_t period;
    disagg::PageList list() const { return {ids, first_page, page_size, num_rows, {edges, period}}; }

    // The definition of the local index of a token, or -1.
    std::int64_t locate(std::int64_t token) const {
        std::int64_t before = 0;
        if (period > 0) {
            const std::int64_t run = edges[1] - edges[0];
            const std::int64_t inside = token - edges[0];
            return inside >= 0 && inside % period < run ? inside / period * run + inside % period : -1;
        }
        for (std::size_t i = 0; i < edges.size(); i += 2) {
            if (edges[i] <= token && token < edges[i + 1]) return token - edges[i] + before;
            before += edges[i + 1] - edges[i];
        }
        return -1;
    }
};
