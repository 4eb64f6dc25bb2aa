"""Exact dynamic program over partial schedules of a layer step, with pruning.

A partial schedule is a row of clocks: the CPU's, and for each GPU the compute queued on
it, its link's, and that of its arrivals. Experts are added one by one in a fixed order,
each on every lane. Two rules prune the rows. A row that is later in every clock than
another can be forgotten: whatever follows, it stays behind. So can a row whose clocks,
weighted by fixed prices and completed with each coming expert's cheapest lane, already
reach the best makespan known (a Lagrangian bound). What is left is small on real
layers, whose costs take few distinct values.

The prices are Lagrange multipliers: give a second on the CPU, on a GPU and on a link
fixed prices that sum to one. A schedule's makespan is then at least the priced cost of
its work, and that is at least the sum of every expert's cost on its cheapest lane. Good
prices are those that make this bound large: there, the lanes are balanced.

A active experts, E experts of a layer, G GPUs, C = 1 + 3 G clocks (CPU; of each GPU:
compute, link, arrivals), R = 1 + 2 G priced resources (CPU; of each GPU: compute,
link), M rows of prices.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import numpy as np

from moesim.policies.arrays import zeros

if TYPE_CHECKING:
    from moesim.policies.arrays import Floats, Ints

# Shares of link and compute in a GPU's price that are tried.
MIXES = 5

# Halvings of the interval in which two lanes' balance is sought.
BISECTIONS = 24

# Relative improvement that is not worth looking for.
TOLERANCE = 1e-10

# Relative difference of two clocks that rounding alone explains.
NOISE = 1e-13

# Rows kept at a time in the first, quick pass and in the second.
FIRST_ROWS = 64
MOST_ROWS = 1 << 13

# Kept rows with which a new one is compared, with one GPU and with several; more
# prunes better, fewer is faster.
NEIGHBOURS = 24
MANY_NEIGHBOURS = 384

# Nodes of the decision tree at first; it doubles when it is full.
FIRST_NODES = 1024


class LaneSearch:
    """The lanes with the smallest makespan. Fill in the problem, then `solve`.

    Attributes:
        active, gpus: A and G.
        cpu_s: float64 [E] on the CPU.
        gpu_s: float64 [G, E] on each GPU once there.
        copy_s: float64 [G, E] on the link; 0 if no copy is needed.
        landing_s: float64 [G, E] landing of a copy in flight; 0 if there is none.
        link_s: float64 [G] from when each link is free.
        busy_s: float64 [G] until when each GPU is taken before any expert.
        first_s: extra seconds of the first CPU expert.
        order: int64 [E], launch order; links and arrivals keep it.
        lanes: int8 [E], the answer.
        makespan_s: its makespan.
        bound_s: a proven lower bound of every makespan: equal to it (which a relative
            1e-10 may still beat) unless the second pass needed slack too.
    """

    def __init__(self, gpus: int, experts: int) -> None:
        by_gpu = (gpus, experts)
        clocks = 1 + 3 * gpus
        self.gpus = gpus
        self.active = 0
        self.first_s = self.makespan_s = self.bound_s = 0.0
        self.cpu_s: Floats = zeros(experts)
        self.gpu_s: Floats = zeros(by_gpu)
        self.copy_s: Floats = zeros(by_gpu)
        self.landing_s: Floats = zeros(by_gpu)
        self.link_s: Floats = zeros(gpus)
        self.busy_s: Floats = zeros(gpus)
        self.order: Ints = zeros(experts, np.int64)
        self.lanes: Ints = zeros(experts, np.int8)
        self.mixes = 0
        self.share: Floats = zeros(1 + gpus)
        self.load_s: Floats = zeros(1 + gpus)
        self.price: Floats = zeros((MIXES, 1 + 2 * gpus))
        # By how much an expert's two cheapest lanes differ.
        self.regret: Floats = zeros(experts)
        # Priced cost of the experts from a place of the order on.
        self.remainder: Floats = zeros((MIXES, experts + 1))
        # From which place on nothing that follows is resident on a GPU.
        self.settled: Ints = zeros((experts, gpus), np.uint8)
        limit = max(FIRST_ROWS, MOST_ROWS // gpus**2)
        self.rows: Floats = zeros((limit, clocks))
        self.extended: Floats = zeros((limit, clocks))
        self.origin: Ints = zeros(limit, np.int64)
        self.extended_origin: Ints = zeros(limit, np.int64)
        self.child: Floats = zeros(clocks)
        self.parent: Floats = zeros(clocks)
        # One cursor into the rows per lane.
        self.cursor: Ints = zeros(1 + gpus, np.int64)
        # Parent and lane of every row that was ever kept.
        self.tree: Ints = zeros((FIRST_NODES, 2), np.int64)
        self.nodes = 0
        self.slack_s = 0.0

    def solve(self, free: int) -> None:
        """Find the lanes, after sorting the first `free` experts of the order, which
        may be launched in any order, by how much their lane matters.
        """
        self._find_prices()
        # Deciding first where it matters most lets the bounds prune early.
        order = self.order
        for n in range(free):
            i = order[n]
            place = n
            while place > 0 and self.regret[order[place - 1]] < self.regret[i]:
                order[place] = order[place - 1]
                place -= 1
            order[place] = i
        self._price_remainder()
        self._find_settled()
        self._answer_greedily()
        lost_s = self._pass(FIRST_ROWS)
        # Where they did not fit, a second pass can keep many rows.
        if lost_s > 0.0:
            lost_s = self._pass(MOST_ROWS // self.gpus**2)
        self.bound_s = self.makespan_s - lost_s
        for m in range(self.mixes):
            self.bound_s = max(self.bound_s, self.remainder[m, 0])

    # -- prices ------------------------------------------------------------------------

    def _find_prices(self) -> None:
        """Price the resources so that the priced work bounds the makespan from below,
        for several mixes of link and compute.
        """
        # Without copies the link's share of a price is lost, so only mix 0 can be good.
        self.mixes = 1
        for g in range(self.gpus):
            for i in range(self.active):
                if self.copy_s[g, i] > 0.0:
                    self.mixes = MIXES
        for m in range(self.mixes):
            mix = m / (MIXES - 1)
            self._balance(mix)
            self.price[m, 0] = self.share[0]
            for g in range(self.gpus):
                self.price[m, 1 + 2 * g] = self.share[g + 1] * (1.0 - mix)
                self.price[m, 2 + 2 * g] = self.share[g + 1] * mix
        for i in range(self.active):
            best = self.price[0, 0] * self.cpu_s[i]
            second = inf
            for g in range(self.gpus):
                cost = self.price[0, 1 + 2 * g] * self.gpu_s[g, i]
                second = min(second, max(best, cost))
                best = min(best, cost)
            self.regret[i] = second - best

    def _balance(self, mix: float) -> None:
        """Find each lane's share of the price: between each pair of lanes, bisect until
        their loads balance. With one GPU that is the optimal dual solution of the mix.
        """
        lanes = self.gpus + 1
        for lane in range(lanes):
            self.share[lane] = 1.0 / lanes
        # One pair settles at once; with several, each bisection disturbs the others, so
        # the pairs are visited three times.
        for _ in range(1 if lanes == 2 else 3):
            for a in range(lanes - 1):
                for b in range(a + 1, lanes):
                    self._balance_pair(mix, a, b)

    def _balance_pair(self, mix: float, a: int, b: int) -> None:
        both = self.share[a] + self.share[b]
        low = 0.0
        high = 1.0
        for _ in range(BISECTIONS):
            middle = 0.5 * (low + high)
            self.share[a] = both * middle
            self.share[b] = both - self.share[a]
            self._load(mix)
            if self.load_s[a] > self.load_s[b]:
                low = middle
            else:
                high = middle

    def _load(self, mix: float) -> None:
        """Put each expert on its cheapest lane, where a GPU's second is `mix` link and
        the rest compute.
        """
        for lane in range(self.gpus + 1):
            self.load_s[lane] = 0.0
        for i in range(self.active):
            lane = 0
            added_s = self.cpu_s[i]
            best = self.share[0] * added_s
            for g in range(self.gpus):
                gpu_s = (1.0 - mix) * self.gpu_s[g, i] + mix * self.copy_s[g, i]
                if self.share[g + 1] * gpu_s < best:
                    best = self.share[g + 1] * gpu_s
                    lane = g + 1
                    added_s = gpu_s
            self.load_s[lane] += added_s

    def _price_remainder(self) -> None:
        """Price the experts from each place of the order on, each on its cheapest
        lane.
        """
        for m in range(self.mixes):
            self.remainder[m, self.active] = 0.0
            # From the last expert on: each sum extends the one behind it.
            for n in range(self.active - 1, -1, -1):
                i = self.order[n]
                least = self.price[m, 0] * self.cpu_s[i]
                for g in range(self.gpus):
                    compute = self.price[m, 1 + 2 * g] * self.gpu_s[g, i]
                    copy = self.price[m, 2 + 2 * g] * self.copy_s[g, i]
                    least = min(least, compute + copy)
                self.remainder[m, n] = self.remainder[m, n + 1] + least

    # -- clocks ------------------------------------------------------------------------

    def _find_settled(self) -> None:
        for n in range(self.active - 1, -1, -1):
            for g in range(self.gpus):
                self.settled[n, g] = 1
                if n + 1 < self.active:
                    i = self.order[n + 1]
                    arrives = self.copy_s[g, i] > 0.0 or self.landing_s[g, i] > 0.0
                    self.settled[n, g] = self.settled[n + 1, g] and arrives

    def _reset(self, clocks: Floats) -> None:
        """Clocks before any expert."""
        clocks[0] = 0.0
        for g in range(self.gpus):
            clocks[1 + 3 * g] = self.busy_s[g]
            clocks[2 + 3 * g] = self.link_s[g]
            clocks[3 + 3 * g] = 0.0

    def _advance(self, lane: int, i: int) -> None:
        """Put an expert on a lane of the child."""
        child = self.child
        if lane == 0:
            first_s = 0.0 if child[0] > 0.0 else self.first_s
            child[0] += first_s + self.cpu_s[i]
            return
        g = lane - 1
        compute = 3 * lane - 2
        link = compute + 1
        arrivals = compute + 2
        gpu_s = self.gpu_s[g, i]
        if self.copy_s[g, i] > 0.0:
            child[link] += self.copy_s[g, i]
            child[arrivals] = max(child[arrivals], child[link]) + gpu_s
        elif self.landing_s[g, i] > 0.0:
            child[arrivals] = max(child[arrivals], self.landing_s[g, i]) + gpu_s
        # Every expert counts here, arrivals too: a GPU is busy with all of them.
        child[compute] += gpu_s

    def _end_s(self) -> float:
        """End of the child's last computation; a link alone delays no result."""
        end_s = self.child[0]
        for g in range(self.gpus):
            end_s = max(end_s, self.child[1 + 3 * g], self.child[3 + 3 * g])
        return end_s

    def _least_s(self, n: int) -> float:
        """A lower bound of every makespan that starts with the child's clocks of the
        first `n` experts.
        """
        child = self.child
        least_s = self._end_s()
        for m in range(self.mixes):
            value = self.remainder[m, n] + self.price[m, 0] * child[0]
            for g in range(self.gpus):
                # A link counts from when it was free; what it copied before is no work.
                value += self.price[m, 1 + 2 * g] * child[1 + 3 * g]
                value += self.price[m, 2 + 2 * g] * (child[2 + 3 * g] - self.link_s[g])
            least_s = max(least_s, value)
        return least_s

    def _answer_greedily(self) -> None:
        """A first answer: each expert, in order, on the lane that would end first."""
        self._reset(self.parent)
        for n in range(self.active):
            i = self.order[n]
            end_s = inf
            self.lanes[i] = 0
            for lane in range(self.gpus, -1, -1):
                self.child[:] = self.parent
                self._advance(lane, i)
                lane_s = self.child[0]
                if lane:
                    lane_s = max(self.child[3 * lane - 2], self.child[3 * lane])
                if lane_s < end_s:
                    self.lanes[i] = lane
                    end_s = lane_s
            self.child[:] = self.parent
            self._advance(self.lanes[i], i)
            self.parent[:] = self.child
        self.child[:] = self.parent
        self.makespan_s = self._end_s()

    # -- rows --------------------------------------------------------------------------

    def _pass(self, limit: int) -> float:
        """Look for better lanes with so many rows at a time; the seconds by which the
        optimum may be missed.

        Where rows do not fit, those that are almost dominated go too, and the slack is
        added up.
        """
        self._reset(self.child)
        for k in range(len(self.child)):
            self.rows[0, k] = self.child[k]
        self.origin[0] = -1
        count = 1
        self.nodes = 0
        self.slack_s = lost_s = 0.0
        for n in range(self.active):
            nodes = self.nodes
            kept = self._extend(n, count, limit)
            while kept < 0:
                self.nodes = nodes
                self.slack_s = max(2.0 * self.slack_s, 1e-6 * self.makespan_s)
                kept = self._extend(n, count, limit)
            count = kept
            # Slack of one expert may hide that much of the optimum; it is tried smaller
            # for the next expert, as crowding comes and goes.
            lost_s += self.slack_s
            self.slack_s *= 0.5
            self._swap()
        for j in range(count):
            self._take_if_better(j)
        return lost_s

    def _swap(self) -> None:
        """The children become parents."""
        rows = self.rows
        self.rows = self.extended
        self.extended = rows
        origin = self.origin
        self.origin = self.extended_origin
        self.extended_origin = origin

    def _take_if_better(self, j: int) -> None:
        """Answer with a row of all experts."""
        for k in range(len(self.child)):
            self.child[k] = self.rows[j, k]
        end_s = self._end_s()
        if end_s >= self.makespan_s:
            return
        self.makespan_s = end_s
        node = self.origin[j]
        for n in range(self.active - 1, -1, -1):
            self.lanes[self.order[n]] = self.tree[node, 1]
            node = self.tree[node, 0]

    def _extend(self, n: int, count: int, limit: int) -> int:
        """Put the n-th expert on every lane of every row, in ascending CPU clock, and
        keep what may still win: how many rows; -1 if they do not fit.
        """
        i = self.order[n]
        # Rows stand in ascending CPU clock, so merging the lanes' children keeps that
        # order without a sort.
        for lane in range(self.gpus + 1):
            self.cursor[lane] = 0
        kept = 0
        while True:
            lane = self._next_lane(i, count)
            if lane < 0:
                return kept
            row = self.cursor[lane]
            self.cursor[lane] += 1
            self._make_child(n, row, lane)
            if self._least_s(n + 1) >= self.makespan_s * (1.0 - TOLERANCE):
                continue
            if self._dominated(kept):
                continue
            if kept == limit:
                return -1
            self._keep(kept, row, lane)
            kept += 1

    def _next_lane(self, i: int, count: int) -> int:
        """Lane whose next row has the earliest CPU clock once expert `i` is on it; -1
        after the last.
        """
        earliest = -1
        earliest_s = inf
        for lane in range(self.gpus + 1):
            if self.cursor[lane] >= count:
                continue
            clock_s = self.rows[self.cursor[lane], 0]
            if lane == 0:
                first_s = 0.0 if clock_s > 0.0 else self.first_s
                clock_s += first_s + self.cpu_s[i]
            if clock_s < earliest_s:
                earliest = lane
                earliest_s = clock_s
        return earliest

    def _make_child(self, n: int, row: int, lane: int) -> None:
        child = self.child
        for k in range(len(child)):
            child[k] = self.rows[row, k]
        self._advance(lane, self.order[n])
        for g in range(self.gpus):
            # Arrivals and the rest share a GPU's compute, so both clocks become one.
            if self.settled[n, g]:
                end_s = max(child[1 + 3 * g], child[3 + 3 * g])
                child[1 + 3 * g] = end_s
                child[3 + 3 * g] = end_s

    def _dominated(self, kept: int) -> bool:
        """Whether one of the last kept rows is, but for the slack, ahead of the child
        in every clock; the CPU's always is.
        """
        slack_s = self.slack_s + NOISE * self.makespan_s
        neighbours = NEIGHBOURS if self.gpus == 1 else MANY_NEIGHBOURS
        for j in range(kept - 1, max(-1, kept - 1 - neighbours), -1):
            ahead = True
            for k in range(1, len(self.child)):
                if self.extended[j, k] > self.child[k] + slack_s:
                    ahead = False
                    break
            if ahead:
                return True
        return False

    def _keep(self, kept: int, row: int, lane: int) -> None:
        """Note the child and where it comes from."""
        if self.nodes == len(self.tree):
            grown = np.zeros((2 * self.nodes, 2), np.int64)
            grown[: self.nodes] = self.tree
            self.tree = grown.data
        self.tree[self.nodes, 0] = self.origin[row]
        self.tree[self.nodes, 1] = lane
        for k in range(len(self.child)):
            self.extended[kept, k] = self.child[k]
        self.extended_origin[kept] = self.nodes
        self.nodes += 1
