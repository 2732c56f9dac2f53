"""Each verb and each rule of the cache store by itself."""
from __future__ import annotations

import pytest
import torch
from cache_oracle import HYBRID, RECURRENT, SOFTMAX, Oracle

from ridgeline.cache import CacheStore, OutOfPages, RoleLayout, plan_sizes
from ridgeline.cache.prefix import root_key
from ridgeline.errors import ConfigError
from ridgeline.types import PagedKV, Recurrent, Shared


def make(target: RoleLayout = SOFTMAX, draft: RoleLayout | None = None, *, page_size: int = 4, num_pages: int = 16,
         num_states: int = 16, prefix_caching: bool = True) -> Oracle:
    roles = {"target": target} | ({"draft": draft} if draft else {})
    return Oracle(CacheStore(roles, page_size=page_size, num_pages=num_pages, num_states=num_states,
                             prefix_caching=prefix_caching))


def prefill(oracle: Oracle, seq: str, tokens: list[int], role: str = "target", **add: object) -> int:
    """Add, match, run what is missing; returns the length of the prefix hit."""
    oracle.add(seq, tokens, **add)
    hit = oracle.match(seq, role)
    oracle.run(seq, role, tokens[hit:])
    oracle.commit(seq)
    oracle.verify()
    return hit


# -- lengths, pages, rollback -------------------------------------------------------------------------------------------


def test_prefill_then_decode_holds_what_was_committed() -> None:
    o = make()
    prefill(o, "a", [1, 2, 3, 4, 5])
    for token in range(10):
        o.tokens["a"].append(token)
        place = o.run("a", "target", [token])
        assert (place.start, place.context, place.state_read, place.state_write) == (5 + token, 6 + token, -1, [-1])
        o.commit("a")
        o.verify()
    assert o.store.held("a") == o.store.length("a") == 15
    assert o.store.free_pages() == 16 - 4


def test_provisional_rows_count_in_length_and_in_held_only_where_they_agree() -> None:
    o = make(SOFTMAX, SOFTMAX)
    o.add("a", [1, 2, 3])
    o.run("a", "draft", [1, 2, 3, 7])
    assert (o.store.held("a", "draft"), o.store.length("a", "draft")) == (3, 4)
    o.run("a", "draft", [8])
    o.run("a", "draft", [9])
    o.commit("a", [7, 8, 5])
    assert o.store.held("a", "draft") == o.store.length("a", "draft") == 5
    assert o.store.held("a", "target") == 0
    o.verify()


def test_rejected_drafts_release_their_pages() -> None:
    o = make()
    prefill(o, "a", [1, 2, 3, 4])
    o.run("a", "target", [5, 6, 7, 8, 9], rollback=5)
    assert o.store.free_pages() == 13
    o.commit("a", [5, 1], keep=[0])
    assert o.store.held("a") == 5 and o.store.free_pages() == 14
    o.verify()


def test_commit_keeps_a_path_of_a_tree() -> None:
    o = make(HYBRID)
    prefill(o, "a", [1, 2, 3])
    #   4 -> 5 -> 7        the last committed token is run too, so 4 is row 1
    #     -> 6 -> 8
    o.tokens["a"].append(4)
    o.run("a", "target", [4, 5, 6, 7, 8], parents=[-1, 0, 0, 1, 2], rollback=4)
    o.commit("a", [6, 8, 0], keep=[0, 2, 4])
    assert o.store.held("a") == 6
    assert o.store.stats().roles["target"].row_moves == 2
    o.verify()
    o.run("a", "target", [0])  # reads the state of the kept leaf
    o.commit("a")
    o.verify()


def test_rows_of_a_tree_do_not_agree_by_chance() -> None:
    o = make(SOFTMAX, SOFTMAX)
    o.add("a", [1])
    o.run("a", "draft", [1, 2, 3], parents=[-1, 0, 0])
    o.commit("a", [2, 3])  # 3 was run as a sibling of 2, not after it
    assert o.store.held("a", "draft") == 2
    o.verify()


def test_scratch_rows_leave_no_trace() -> None:
    for layout in (SOFTMAX, HYBRID):
        o = make(layout)
        prefill(o, "a", [1, 2, 3, 4, 5])
        for _ in range(3):
            place = o.run("a", "target", [9, 9, 9, 9], write=0)
            assert place.start == 5 and set(place.state_write) == {-1}
            assert o.store.length("a") == 5
        o.run("a", "target", [6, 7, 9, 9], write=2)
        o.commit("a", [6, 7])
        assert o.store.held("a") == 7
        o.verify()


def test_overwriting_drops_what_was_held_from_there_on() -> None:
    o = make()
    prefill(o, "a", list(range(10)))
    o.run("a", "target", [5, 6], at=5)
    assert o.store.length("a") == o.store.held("a") == 7
    o.commit("a")
    assert o.store.held("a") == 7
    o.verify()
    with pytest.raises(AssertionError, match="7 positions are held"):
        o.store.reserve("a", "target", [1], at=8)


def test_slices_of_one_run_are_kept_by_index() -> None:
    o = make()
    o.add("a", [1, 2, 3, 4, 5])
    o.run("a", "target", [1, 2, 3])
    o.run("a", "target", [4, 5, 6, 7], offset=3)
    o.commit("a", [6, 0], keep=range(6))
    assert o.store.held("a") == 6
    o.run("a", "target", [0])
    with pytest.raises(AssertionError, match="offset 3"):
        o.store.reserve("a", "target", [1], offset=3)
    with pytest.raises(AssertionError, match="keep"):
        o.store.commit("a", [1])


# -- running out --------------------------------------------------------------------------------------------------------


def test_out_of_pages_changes_nothing() -> None:
    o = make(num_pages=3)
    prefill(o, "a", [1, 2, 3, 4, 5])
    before = o.holdings()
    with pytest.raises(OutOfPages):
        o.store.reserve("a", "target", list(range(9)))
    assert o.holdings() == before
    o.run("a", "target", [1, 2, 3])
    o.verify()


def test_out_of_states_is_out_of_pages() -> None:
    o = make(HYBRID, num_states=3)
    prefill(o, "a", [1, 2, 3])
    prefill(o, "z", [1, 2])
    prefill(o, "b", [4])
    o.tokens["b"].append(5)
    with pytest.raises(OutOfPages, match="state"):
        o.store.reserve("b", "target", [5])
    o.free("a")
    o.run("b", "target", [5])
    o.commit("b")
    o.verify()


def test_a_full_store_overwrites_published_pages_in_place() -> None:
    o = make(num_pages=2)
    prefill(o, "a", list(range(8)))
    o.run("a", "target", [1, 2], at=1)
    o.commit("a")
    o.verify()
    o.free("a")
    assert o.store.free_pages() == 2
    assert prefill(o, "b", list(range(8))) == 0


@pytest.mark.parametrize("slots", [3, 4, 8])
def test_chunked_prefill_and_drafting_work_with_few_states(slots: int) -> None:
    o = make(HYBRID, HYBRID, num_states=slots)
    tokens = list(range(23))
    o.add("a", tokens)
    for start in range(0, 23, 5):
        o.run("a", "target", tokens[start:start + 5], offset=start)
        o.verify()
        assert o.store.stats().roles["target"].states_used <= 3
    o.commit("a")
    assert o.store.held("a") == 23
    for token in (*range(23), 1, 2, 3, 4):
        o.run("a", "draft", [token])
    o.run("a", "target", [1, 2, 3, 4], rollback=4)
    o.commit("a", [1, 2, 9], keep=[0, 1])
    o.verify()
    # with few slots the target falls back to the state at the page boundary, the draft to where it began
    assert (o.store.held("a"), o.store.held("a", "draft")) == ((25, 25) if slots == 8 else (24, 23))


# -- prefix cache -------------------------------------------------------------------------------------------------------


def test_prefix_hit_leaves_a_token_to_run() -> None:
    o = make()
    assert prefill(o, "a", list(range(8))) == 0
    assert prefill(o, "b", list(range(8))) == 4
    assert prefill(o, "c", [*range(8), 9]) == 8
    assert prefill(o, "d", [*range(7), 9, 9]) == 4
    o.add("e", list(range(12)))
    assert o.store.match_prefix("e", "target", limit=7) == 4
    stats = o.store.stats().roles["target"]
    assert (stats.prefix_queries, stats.prefix_hits) == (8 + 8 + 9 + 9 + 12, 4 + 8 + 4 + 4)


@pytest.mark.parametrize("add", [{"salt": "x"}, {"publish": False}])
def test_salt_and_unpublished_sequences_do_not_share(add: dict[str, object]) -> None:
    o = make()
    prefill(o, "a", list(range(9)), **add)
    assert prefill(o, "b", list(range(9))) == 0
    assert prefill(o, "c", list(range(9))) == 8


def test_domain_and_root_keys_separate() -> None:
    o = make()
    prefill(o, "a", list(range(9)))
    o.store.add("b", list(range(9)), domain="block")
    assert o.store.match_prefix("b", "target") == 0
    assert root_key("ab", "c") != root_key("a", "bc") != root_key("a", "b", "c")
    assert root_key("\ud800") != root_key("?")


def test_rows_that_see_their_block_hit_only_where_the_whole_block_agrees() -> None:
    o = make()
    first = list(range(8))
    prefill(o, "a", [*first, 9, 9], align=8)
    assert o.store.held("a") == 8
    assert prefill(o, "b", [*first[:6], 9, 9, 9, 9], align=8) == 0  # page 0 saw tokens 6 and 7
    assert prefill(o, "c", [*first, 1], align=8) == 8
    assert prefill(o, "d", [*first, 1], align=4) == 0
    o.fork("a", "e", 7, [1])
    assert o.store.held("e") == 0


def test_no_prefix_caching() -> None:
    o = make(prefix_caching=False)
    prefill(o, "a", list(range(9)))
    o.free("a")
    assert prefill(o, "b", list(range(9))) == 0
    assert o.store.stats().roles["target"].pages_cached == 0


def test_fed_rows_are_never_published_until_they_are_overwritten() -> None:
    o = make()
    tokens = list(range(13))
    o.add("a", tokens)
    o.run("a", "target", tokens[:4])
    o.run("a", "target", tokens[4:8], nonce=1)
    o.run("a", "target", tokens[8:12])
    o.commit("a")
    assert prefill(o, "b", tokens, publish=False) == 4
    o.run("a", "target", tokens[4:], at=4)
    o.commit("a")
    assert prefill(o, "c", tokens) == 12


def test_rejected_tokens_are_never_published() -> None:
    o = make()
    prefill(o, "a", [1, 2])
    o.run("a", "target", [3, 4, 5, 6, 7, 8])
    o.commit("a", [3, 9], keep=[0])
    assert prefill(o, "b", [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 0


def test_cached_pages_are_evicted_oldest_and_deepest_first() -> None:
    o = make(num_pages=6)
    prefill(o, "a", [1] * 8)
    prefill(o, "b", [2] * 8)
    o.free("a")
    o.free("b")
    prefill(o, "c", [3] * 11)  # two pages are free, the third is the second page of `a`
    o.free("c")
    assert prefill(o, "d", [1] * 9) == 4
    assert o.store.stats().roles["target"].page_evictions > 0


def test_a_second_copy_of_a_page_stays_private_and_its_pages_chain() -> None:
    o = make()
    o.add("a", [1] * 9)
    o.add("b", [1] * 9)
    for seq in "ab":
        o.run(seq, "target", [1] * 9)
    for seq in "ab":
        o.commit(seq)
    o.verify()
    o.tokens["b"] += [2] * 4
    o.run("b", "target", [2] * 4)
    o.commit("b")
    assert prefill(o, "c", [1] * 9 + [2] * 4) == 12


def test_hybrid_hits_need_a_state_and_the_junction_provides_it() -> None:
    o = make(HYBRID, num_pages=40)
    system = list(range(8))
    assert prefill(o, "a", [*system, *[20] * 9]) == 0
    assert prefill(o, "b", [*system, *[21] * 9]) == 0   # pages match, but no state: saves one where they part
    assert prefill(o, "c", [*system, *[22] * 9]) == 8
    for seq in "abc":
        o.free(seq)
    assert prefill(o, "d", [*system, *[20] * 9]) == 16
    o.verify()


def test_recurrent_roles_hit_without_pages() -> None:
    o = make(RECURRENT, num_pages=1)
    system = list(range(8))
    for seq, hit in (("a", 0), ("b", 0), ("c", 8)):
        assert prefill(o, seq, [*system, *[ord(seq)] * 9]) == hit
    assert o.store.free_pages() == 1


def test_state_eviction_keeps_the_page() -> None:
    o = make(HYBRID, num_states=3)
    prefill(o, "a", [1] * 9)
    o.free("a")
    for seq in "bcd":
        prefill(o, seq, [ord(seq)] * 3)
    stats = o.store.stats().roles["target"]
    assert stats.state_evictions >= 1 and stats.pages_cached == 2
    o.free("b")
    assert prefill(o, "e", [1] * 9) == 0
    o.verify()


def test_reset_forgets_cached_and_live_pages() -> None:
    for layout in (SOFTMAX, HYBRID, RECURRENT):
        o = make(layout)
        prefill(o, "a", list(range(9)))
        prefill(o, "b", list(range(9)))
        o.free("a")
        o.store.reset_prefix_cache()
        o.verify()
        assert prefill(o, "c", list(range(9))) == 0


# -- fork ---------------------------------------------------------------------------------------------------------------


def test_fork_shares_pages_and_copies_on_the_first_write() -> None:
    o = make()
    prefill(o, "a", list(range(6)))
    used = o.store.stats().roles["target"].pages_used
    o.fork("a", "b", 6, [7])
    assert o.store.stats().roles["target"].pages_used == used
    o.run("b", "target", [7])
    assert o.store.stats().roles["target"].page_copies == 1
    o.tokens["a"].append(8)
    o.run("a", "target", [8])
    assert o.store.stats().roles["target"].page_copies == 1, "the last owner writes in place"
    o.commit("a")
    o.commit("b")
    o.verify()
    o.free("a")
    o.verify()
    assert o.store.held("b") == 7


def test_fork_of_a_recurrent_role_starts_at_a_saved_state() -> None:
    o = make(HYBRID)
    prefill(o, "a", list(range(6)))
    o.fork("a", "b", 6, [7])
    o.fork("a", "c", 5, [7])
    assert (o.store.held("b"), o.store.held("c")) == (6, 0)
    assert o.match("c") == 4  # the state at the page boundary was published
    o.verify()
    with pytest.raises(AssertionError, match="differ"):
        o.store.fork("a", "d", [9] * 6, length=6)


# -- tensors and configuration ------------------------------------------------------------------------------------------


def test_views_have_the_documented_shapes_and_shared_layers_resolve() -> None:
    draft = RoleLayout((Shared("target", 1), PagedKV(1, 4, 4), Shared("draft", 0)), torch.float32, "d")
    store = CacheStore({"target": HYBRID, "draft": draft}, page_size=4, num_pages=5, num_states=3)
    k, v = store.views["target"].kv(1)
    assert (k.shape, v.shape, k.dtype) == ((5, 1, 4, 2), (5, 1, 4, 3), torch.float64)
    assert not k.any() and not v.any()
    assert store.views["target"].recurrent(0)["conv"].shape == (3, 2, 2)
    assert store.views["draft"].kv(0)[0] is k and store.views["draft"].kv(2)[1] is v
    store.add("a", [1, 2, 3])
    target = store.reserve("a", "target", [1, 2, 3])
    place = store.reserve("a", "draft", [1, 2], write=0)
    assert place.shared == {"target": target.pages}


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16], ids=str)
def test_rows_that_are_copied_and_moved_take_their_scales_along(dtype: torch.dtype) -> None:
    store = CacheStore({"target": RoleLayout((PagedKV(2, 3, 5),) * 2, dtype, "m")}, page_size=4, num_pages=6, num_states=0)
    view = store.views["target"]
    tensors = [t for layer in range(2) for t in (*view.kv(layer), *(view.scales(layer) or ()))]
    assert len(tensors) == (8 if dtype == torch.int8 else 4)
    if dtype == torch.int8:
        assert [(t.shape, t.dtype) for t in view.scales(1) or ()] == [((6, 2, 4), torch.float32)] * 2
    generator = torch.Generator().manual_seed(0)
    for t in tensors:
        t.copy_(torch.randint(-100, 100, t.shape, generator=generator))
    before = [t.clone() for t in tensors]
    view.copy_page(2, 5, 3)
    for t, old in zip(tensors, before):
        assert torch.equal(t[5, :, :3], old[2, :, :3]) and torch.equal(t[5, :, 3], old[5, :, 3])
        assert torch.equal(t[:5], old[:5])
    view.move_rows([4, 1], [3, 6, 7], 2)                   # rows of pages 4 and 1, onto positions 2, 3 and 4
    for t, old in zip(tensors, before):
        assert torch.equal(t[4, :, 2], old[4, :, 3]) and torch.equal(t[4, :, 3], old[1, :, 2])
        assert torch.equal(t[1, :, 0], old[1, :, 3]) and torch.equal(t[1, :, 1:], old[1, :, 1:])


def test_int8_pages_are_counted_with_their_scales() -> None:
    layout = RoleLayout((PagedKV(2, 64, 32), Recurrent((("ssm", (2,), "float32"),))), torch.int8, "m")
    assert layout.kv_bytes_per_token() == 2 * (64 + 32) + 2 * 2 * 4
    assert plan_sizes({"target": RoleLayout(layout.layers[:1], torch.int8, "m")}, 4, 4 * 208 * 7 + 1, 1) == (7, 0)


def test_the_dtype_of_the_cache_is_part_of_the_prefix_key() -> None:
    keys = set()
    for dtype in (torch.int8, torch.bfloat16):
        store = CacheStore({"target": RoleLayout((PagedKV(1, 4, 4),), dtype, "m")}, page_size=4, num_pages=2, num_states=0)
        keys.add(store._root(store._roles["target"], "causal", "", 1))
    assert len(keys) == 2


def test_sequences_and_roles_are_checked() -> None:
    o = make()
    o.add("a", [1])
    for call in (lambda: o.store.add("a", [1]), lambda: o.store.free("b"), lambda: o.store.commit("b"),
                 lambda: o.store.held("b"), lambda: o.store.reserve("a", "draft", [1]),
                 lambda: o.store.fork("a", "a", [1], length=0), lambda: o.store.free_pages("draft")):
        with pytest.raises(AssertionError, match=r"'[ab]'|'draft'"):
            call()


@pytest.mark.parametrize(("roles", "sizes", "message"), [
    ({"draft": SOFTMAX}, (4, 4, 4), "target"),
    ({"target": SOFTMAX}, (0, 4, 4), "page_size=0"),
    ({"target": SOFTMAX}, (4, 0, 4), "num_pages=0"),
    ({"target": HYBRID}, (4, 4, 2), "num_states=2"),
    ({"target": RoleLayout((Shared("x", 0),), torch.float32, "m")}, (4, 4, 4), "'x'"),
    ({"target": RoleLayout((Shared("target", 0),), torch.float32, "m")}, (4, 4, 4), "layer 0"),
    ({"target": RoleLayout((RECURRENT.layers[0], Shared("target", 0)), torch.float32, "m")}, (4, 4, 4), "no keys"),
    ({"target": RoleLayout((Recurrent((("s", (1,), "int"),)), Recurrent((("s", (1,), "nn"),))), torch.float32, "m")},
     (4, 4, 4), "'nn'"),
])
def test_bad_configurations(roles: dict[str, RoleLayout], sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CacheStore(roles, page_size=sizes[0], num_pages=sizes[1], num_states=sizes[2])


def test_plan_sizes_divides_one_budget() -> None:
    page, state = 4 * 8 * (2 * 4 + 1 * 4), 8 * (4 + 3 + 1)
    assert plan_sizes({"target": SOFTMAX}, 4, 10 * page + 5, 3) == (10, 0)
    kv = 4 * 8 * 5
    for memory in (kv + 3 * state, 5000, 100_000):
        pages, states = plan_sizes({"target": HYBRID}, 4, memory, 3, rollback=2)
        assert pages >= 1 and 3 <= states <= 3 * 2 * 4 and pages * kv + states * state <= memory
        assert (pages + 1) * kv + states * state > memory
    assert plan_sizes({"target": RECURRENT}, 4, 16 * 9, 100) == (1, 9)
    with pytest.raises(ConfigError, match=f"at least {kv + 3 * state} are needed"):
        plan_sizes({"target": HYBRID}, 4, kv + 3 * state - 1, 3)


def test_can_hold() -> None:
    o = make(SOFTMAX, RECURRENT, num_pages=3)
    assert o.store.can_hold(12) and not o.store.can_hold(13)
    assert make(RECURRENT, num_pages=1).store.can_hold(10_000)
