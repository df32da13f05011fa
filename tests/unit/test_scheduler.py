"""Which rows a step takes, and who gives way when pages run out."""

from __future__ import annotations

from fake_executor import FakeTokenizer

from paceline.engine.detokenize import TokenBytes
from paceline.engine.request import Request
from paceline.engine.scheduler import Schedule, Scheduler
from paceline.errors import KVCapacityError
from paceline.kv.manager import KVManager
from paceline.params import SamplingParams

TOKENIZER = FakeTokenizer()


def make_scheduler(
    *, pages: int = 64, max_batch: int = 4, token_budget: int = 16, max_outputs: int = 64, context: int = 512
) -> Scheduler:
    kv = KVManager(pages, max_batch, context)
    return Scheduler(kv, max_batch=max_batch, token_budget=token_budget, max_outputs=max_outputs)


def make_request(request_id: int, num_prompt: int, *, prompt_logprobs: int | None = None) -> Request:
    params = SamplingParams(prompt_logprobs=prompt_logprobs)
    return Request(
        request_id,
        [1 + request_id] * num_prompt,  # nothing in common with others
        params,
        seed=0,
        context_length=512,
        eos_token_ids=(96,),
        token_bytes=TokenBytes(TOKENIZER),
    )


def commit(schedule: Schedule) -> None:
    """What the engine does after a step, with token 7 for everyone."""
    for request in schedule.requests:
        if request.prompt_logprobs is not None:
            owed = request.num_prompt - len(request.prompt_logprobs)
            request.prompt_logprobs += [None] * min(owed, request.num_outputs)
        request.num_computed += request.num_scheduled
        if request.num_computed == len(request.tokens):
            request.tokens.append(7)


def rows(schedule: Schedule) -> list[tuple[int, int, int]]:
    """(request, rows, outputs) in the order of the plan."""
    return [(r.request_id, r.num_scheduled, r.num_outputs) for r in schedule.requests]


def test_decodes_come_first_then_prefill_in_chunks_then_new_requests() -> None:
    scheduler = make_scheduler(token_budget=10)
    for request_id, num_prompt in enumerate((3, 20, 9)):
        scheduler.add(make_request(request_id, num_prompt))
    steps = []
    for _ in range(5):
        schedule = scheduler.plan()
        steps.append(rows(schedule))
        commit(schedule)
        scheduler.check()
    assert steps == [
        [(0, 3, 1), (1, 7, 0)],
        [(0, 1, 1), (1, 9, 0)],
        [(0, 1, 1), (1, 4, 1), (2, 5, 0)],
        [(0, 1, 1), (1, 1, 1), (2, 4, 1)],
        [(0, 1, 1), (1, 1, 1), (2, 1, 1)],
    ]


def test_a_long_prompt_never_stops_a_decode() -> None:
    scheduler = make_scheduler(token_budget=8, pages=64)
    scheduler.add(make_request(0, 2))
    commit(scheduler.plan())
    scheduler.add(make_request(1, 500))
    for _ in range(50):
        schedule = scheduler.plan()
        assert rows(schedule)[0] == (0, 1, 1)
        assert sum(r.num_scheduled for r in schedule.requests) <= 8
        commit(schedule)


def test_no_more_requests_run_than_max_batch() -> None:
    scheduler = make_scheduler(max_batch=2)
    requests = [make_request(request_id, 1) for request_id in range(3)]
    for request in requests:
        scheduler.add(request)
    commit(scheduler.plan())
    assert scheduler.running == requests[:2]
    scheduler.remove(requests[0])
    commit(scheduler.plan())
    assert scheduler.running == requests[1:]


def test_nobody_is_admitted_without_rows() -> None:
    scheduler = make_scheduler(token_budget=4)
    scheduler.add(make_request(0, 4))
    scheduler.add(make_request(1, 4))
    commit(scheduler.plan())
    assert len(scheduler.running) == 1


def test_prompt_logprobs_bound_the_chunk_by_the_outputs() -> None:
    scheduler = make_scheduler(token_budget=64, max_outputs=5)
    scheduler.add(make_request(0, 12, prompt_logprobs=0))
    scheduler.add(make_request(1, 3))
    steps = []
    for _ in range(4):
        schedule = scheduler.plan()
        steps.append(rows(schedule))
        commit(schedule)
    assert steps == [
        [(0, 5, 5), (1, 2, 0)],  # no output is left for the last row of request 1
        [(1, 1, 1), (0, 4, 4)],
        [(1, 1, 1), (0, 3, 3)],
        [(0, 1, 1), (1, 1, 1)],
    ]


def test_admission_waits_for_pages_of_the_whole_prompt_and_one_for_each_running() -> None:
    scheduler = make_scheduler(pages=4, token_budget=64)
    first, second = make_request(0, 32), make_request(1, 96)
    scheduler.add(first)
    scheduler.add(second)
    commit(scheduler.plan())
    assert scheduler.running == [first]
    scheduler.remove(first)
    schedule = scheduler.plan()
    assert rows(schedule) == [(1, 64, 0)]
    assert len(scheduler.kv.pages(second.slot or 0)) == 3


def test_a_small_request_does_not_overtake_one_that_waits() -> None:
    scheduler = make_scheduler(pages=4)
    for request_id, num_prompt in enumerate((60, 100, 1)):
        scheduler.add(make_request(request_id, num_prompt))
    commit(scheduler.plan())
    assert [request.request_id for request in scheduler.running] == [0]


def test_the_request_with_least_computed_work_gives_way() -> None:
    scheduler = make_scheduler(pages=4, token_budget=64)
    long, short = make_request(0, 60), make_request(1, 20)
    scheduler.add(long)
    scheduler.add(short)
    for _ in range(40):
        commit(scheduler.plan())
        scheduler.check()
        if scheduler.preemptions:
            break
    assert scheduler.running == [long]
    assert list(scheduler.waiting) == [short]
    assert short.num_computed == 0
    assert scheduler.wasted_tokens == 0, "nothing is wasted before it is computed again"
    scheduler.remove(long)
    commit(scheduler.plan())
    assert scheduler.running == [short]
    assert short.num_computed == len(short.tokens) - 1, "all its tokens are computed again, the drawn ones included"
    assert scheduler.wasted_tokens == short.num_wasted < 32, "what its first page held was still cached"


def test_the_latest_gives_way_among_equals() -> None:
    scheduler = make_scheduler(pages=4, token_budget=64)
    requests = [make_request(request_id, 31) for request_id in range(3)]
    for request in requests:
        scheduler.add(request)
    while not scheduler.preemptions:
        commit(scheduler.plan())
    # The third is admitted only when a page is free for each running one, so two run; the later of them gives way.
    assert scheduler.running == requests[:1]
    assert list(scheduler.waiting) == requests[1:]


def test_who_outgrows_the_pool_fails_alone() -> None:
    scheduler = make_scheduler(pages=2, token_budget=64)
    request, other = make_request(0, 30), make_request(1, 5)
    scheduler.add(request)
    scheduler.add(other)
    failed: list[Request] = []
    for _ in range(120):
        schedule = scheduler.plan()
        scheduler.check()
        failed += schedule.failed
        commit(schedule)
        if failed:
            break
    assert failed == [request]
    assert isinstance(request.error, KVCapacityError)
    assert (request.error.num_tokens, request.error.num_pool_tokens) == (65, 64)
    schedule = scheduler.plan()
    assert [r.request_id for r in schedule.requests] == [1]


def test_removing_a_request_frees_its_pages_and_slot() -> None:
    scheduler = make_scheduler(pages=8)
    waiting, running = make_request(0, 100), make_request(1, 100)
    scheduler.add(running)
    commit(scheduler.plan())
    scheduler.add(waiting)
    scheduler.remove(waiting)
    scheduler.remove(running)
    scheduler.check()
    assert scheduler.kv.num_available == 8
    assert scheduler.plan() == Schedule()


def test_bound_on_prompt_rows_hears_of_decodes_and_of_the_prompts_that_could_be_read() -> None:
    asked: list[tuple[int, int]] = []

    def at_most(num_decodes: int, num_prompts: int) -> int | None:
        asked.append((num_decodes, num_prompts))
        return 4

    scheduler = make_scheduler(token_budget=32)
    watched = make_request(0, 3)
    watched.streaming = True
    scheduler.add(watched)
    commit(scheduler.plan(at_most))
    for request_id in range(1, 8):
        scheduler.add(make_request(request_id, 6))
    steps = []
    for _ in range(3):
        schedule = scheduler.plan(at_most)
        steps.append((rows(schedule), schedule.decodes_and_prompt_rows()))
        commit(schedule)
    assert [row for row, _ in steps] == [
        [(0, 1, 1), (1, 4, 0)],
        [(0, 1, 1), (1, 2, 1), (2, 2, 0)],
        [(0, 1, 1), (1, 1, 1), (2, 4, 1)],
    ]
    assert [counts for _, counts in steps] == [(1, 4), (1, 4), (2, 4)]
    # Seven wait, but the batch has three places; what is being read counts, what has been does not.
    assert asked == [(1, 3), (1, 3), (2, 2)]


def test_prompts_that_find_no_pages_do_not_count_as_waiting() -> None:
    asked: list[int] = []

    def at_most(num_decodes: int, num_prompts: int) -> int | None:
        asked.append(num_prompts)
        return None

    scheduler = make_scheduler(pages=3, token_budget=64)
    watched = make_request(0, 40)
    watched.streaming = True
    scheduler.add(watched)
    commit(scheduler.plan(at_most))
    scheduler.add(make_request(1, 40))
    for _ in range(3):
        commit(scheduler.plan(at_most))
    assert asked == [1, 0, 0]
