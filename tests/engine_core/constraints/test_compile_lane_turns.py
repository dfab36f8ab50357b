"""Turns of grammars between API keys."""

from tandem.engine_core.constraints.compile_lane import CompileTurns


def taken(turns: CompileTurns) -> list[str | None]:
    return [turns.take() for _ in range(3)]


def test_requests_without_a_key_may_have_all_threads_in_their_order() -> None:
    turns = CompileTurns(2)
    for grammar in "abc":
        turns.add("", grammar)
    assert taken(turns) == ["a", "b", None]
    turns.end("b")
    assert taken(turns) == ["c", None, None]


def test_a_key_leaves_a_thread_to_others_unless_there_is_only_one() -> None:
    for num_threads, expected in ((3, ["a", "b", None]), (2, ["a", None, None]), (1, ["a", None, None])):
        turns = CompileTurns(num_threads)
        for grammar in "abcd":
            turns.add("alice", grammar)
        assert taken(turns) == expected


def test_keys_take_turns() -> None:
    turns = CompileTurns(1)
    for key, grammar in (("alice", "a1"), ("alice", "a2"), ("alice", "a3"), ("bob", "b1"), ("bob", "b2")):
        turns.add(key, grammar)
    order = []
    while (grammar := turns.take()) is not None:
        order.append(grammar)
        turns.end(grammar)
    assert order == ["a1", "b1", "a2", "b2", "a3"]


def test_a_grammar_of_several_keys_is_compiled_once_and_one_removed_never() -> None:
    turns = CompileTurns(3)
    for key in ("alice", "bob"):
        turns.add(key, "shared")
        turns.add(key, "gone")
    turns.remove("gone")
    assert taken(turns) == ["shared", None, None]
