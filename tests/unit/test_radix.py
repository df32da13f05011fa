"""The order in which the prefix tree gives pages up."""

from __future__ import annotations

from paceline.config import PAGE_TOKENS
from paceline.kv.manager import token_key
from paceline.kv.pool import PagePool
from paceline.kv.radix import Node, RadixTree


def grow(tree: RadixTree, parent: Node, first_token: int) -> Node:
    """A child in a page of its own, which only the tree owns afterwards."""
    page = tree.pool.allocate()
    assert page is not None
    node = tree.insert(parent, token_key(range(first_token, first_token + PAGE_TOKENS)), page)
    assert node is not None
    tree.unlock(page)
    return node


def evicted(tree: RadixTree, nodes: dict[str, Node]) -> str:
    """The names of ``nodes`` in the order in which their pages go, one by one."""
    order = ""
    while tree.num_evictable:
        assert tree.evict(1) == 1
        tree.check()
        gone = [name for name, node in nodes.items() if node.page is None and name not in order]
        assert len(gone) == 1
        order += gone[0]
    return order


def forked(*, windowed: bool = False) -> tuple[RadixTree, dict[str, Node]]:
    """a - b, with c and d after b, and e beside a; made, and so used, in this order."""
    tree = RadixTree(PagePool(8), windowed=windowed)
    root = tree.root(b"")
    a = grow(tree, root, 0)
    b = grow(tree, a, 100)
    nodes = {"a": a, "b": b, "c": grow(tree, b, 200), "d": grow(tree, b, 300), "e": grow(tree, root, 400)}
    tree.check()
    return tree, nodes


def test_leaves_go_first_and_of_these_the_one_used_least_recently() -> None:
    tree, nodes = forked()
    # a and b are older than all, but others follow them; then they are.
    assert evicted(tree, nodes) == "cdbae"


def test_what_is_used_again_goes_last() -> None:
    tree, nodes = forked()
    tree.touch([nodes["a"], nodes["b"], nodes["c"]])
    assert evicted(tree, nodes) == "decba"


def test_with_a_window_parents_go_before_what_follows_them() -> None:
    tree, nodes = forked(windowed=True)
    assert evicted(tree, nodes) == "abcde"


def test_locked_pages_stay_and_so_do_those_before_them() -> None:
    tree, nodes = forked()
    page = nodes["d"].page
    assert page is not None
    tree.lock(page)
    assert tree.evict(8) == 2
    assert [name for name, node in nodes.items() if node.page is None] == ["c", "e"]
    tree.check()
    tree.unlock(page)
    assert tree.evict(8) == 3
    assert tree.pool.num_free == 8
