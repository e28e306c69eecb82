"""The examples of environments: rows, what a game tells the model, a curriculum's levels, an agent with queues."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from buffer_rl.cli import main
from buffer_rl.plugin.registry import check_contract
from buffer_rl.records.groups import GroupUid, Sample, SampleGroup, Ticket
from buffer_rl.testing.fake_buffer import FakeBuffer
from harness.agent_play import AgentEngine, roll

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "environments"
LAKE = ["SFFF", "FHFH", "FFFH", "HFFG"]


@cache
def load(name: str) -> ModuleType:
    """Once, as a run does: what begins games one after another is one lock of the module."""
    spec = importlib.util.spec_from_file_location(f"environments_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # a dataclass looks there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``frozen_lake`` and ``text_arena`` with their files."""
    made = tmp_path_factory.mktemp("games")
    for game in ("frozen_lake", "text_arena"):
        load("prepare").prepare(game, made / game)
    return made


def rows(folder: Path, game: str, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / game / f"{name}.jsonl").read_text().splitlines()]


def played(game: Any, actions: str) -> list[tuple[str, Any, bool]]:
    return [game.step(action) for action in actions]


# -- FrozenLake ------------------------------------------------------------------------------------


def test_the_lake_shows_where_one_stands_and_what_is_around() -> None:
    game = load("frozen_lake").FrozenLake()
    assert game.reset(map=LAKE, seed=0) == "00#FF#"
    seen, rewards, ends = zip(*played(game, "rdd"), strict=False)
    assert seen[:2] == ("01SHF#", "11FFFF")
    assert (rewards[:2], ends[:2]) == ((0.0, 0.0), (False, True))  # into the hole
    assert game.reward() == {"score": pytest.approx(0.3 * 1 / 6), "won": 0.0}
    game.close()


def test_the_goal_is_worth_one_and_the_way_to_it_and_a_word_that_is_no_direction_ends_the_game() -> None:
    game = load("frozen_lake").FrozenLake()
    game.reset(map=LAKE, seed=0)
    steps = played(game, "ddrrdr")
    assert [seen for seen, _, _ in steps] == ["10#FHS", "20#HFF", "21FFFH", "22FFHF", "32F#GF", "33F##H"]
    assert steps[-1][1:] == (1.0, True)
    assert game.reward() == {"score": pytest.approx(0.3), "won": 1.0}
    for word in ("x", "", "lr"):
        game.reset(map=LAKE, seed=0)
        assert game.step(word) == ("", 0.0, True)
        assert game.reward() == {"score": 0.0, "won": 0.0}
    game.reset(map=LAKE, seed=0)
    assert [done for _, _, done in played(game, "l" * 12)] == [False] * 11 + [True]


def test_no_lake_is_in_both_files_and_every_lake_has_a_way(folder: Path) -> None:
    maps = {name: ["/".join(row["metadata"]["map"]) for row in rows(folder, "frozen_lake", name)] for name in NAMES}
    assert [len(set(maps[name])) for name in NAMES] == [400, 100]
    assert not set(maps["train"]) & set(maps["heldout"])
    for lake in maps["heldout"]:
        assert reaches_goal(lake.split("/"))


NAMES = ("train", "heldout")


def reaches_goal(lake: list[str]) -> bool:
    found, todo = {(0, 0)}, [(0, 0)]
    while todo:
        row, column = todo.pop()
        for place in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
            if place not in found and all(0 <= at < 4 for at in place) and lake[place[0]][place[1]] != "H":
                found.add(place)
                todo.append(place)
    return (3, 3) in found


# -- textarena -------------------------------------------------------------------------------------


def bisected(settings: dict[str, Any], seed: int) -> tuple[str, dict[str, float]]:
    """The hints on the way, and the score."""
    game = load("text_arena").GuessTheNumber()
    assert game.reset(settings=settings, seed=seed) == f"{settings['min_number']}-{settings['max_number']}"
    low, high, hints, done = settings["min_number"], settings["max_number"], "", False
    while not done:
        middle = (low + high) // 2
        hint, reward, done = game.step(str(middle))
        assert reward is None
        hints += hint
        low, high = (middle + 1, high) if hint == ">" else (low, middle - 1)
    return hints, game.reward()


def test_bisection_wins_every_game_of_textarena_and_no_range_is_in_both_files(folder: Path) -> None:
    found = {name: rows(folder, "text_arena", name) for name in NAMES}
    ranges = [
        {
            row["metadata"]["settings"]["min_number"] * 10 + row["metadata"]["settings"]["max_number"]
            for row in found[name]
        }
        for name in NAMES
    ]
    assert [len(each) for each in ranges] == [36, 9]
    assert not ranges[0] & ranges[1]
    for row in found["heldout"][::4]:
        assert bisected(row["metadata"]["settings"], row["metadata"]["seed"])[1] == {"score": 1.0, "won": 1.0}


def test_games_that_begin_at_the_same_time_depend_on_their_seeds_alone() -> None:
    settings = {"min_number": 0, "max_number": 9, "max_turns": 4}
    alone = [bisected(settings, seed) for seed in range(40)]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda seed: bisected(settings, seed), range(40)))
    assert together == alone
    assert len({hints for hints, _ in alone}) > 5


def test_a_move_that_the_game_refuses_twice_ends_it_and_guesses_that_come_near_score() -> None:
    game = load("text_arena").GuessTheNumber()
    game.reset(settings={"min_number": 0, "max_number": 9, "max_turns": 4}, seed=1)
    assert game.step("x") == ("?", None, False)
    assert game.step("x") == ("?", None, True)
    assert game.reward() == {"score": 0.0, "won": 0.0}


def test_another_game_speaks_in_its_own_words() -> None:
    game = load("text_arena").TextArena()
    assert "Tower of Hanoi with 3 disks" in game.reset(game="TowerOfHanoi-v0-raw", seed=0)
    said, _, done = game.step("[A C]")
    assert (not done, "A: [3, 2]" in said, "[A C]" in said) == (True, True, False)
    for move in ("[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]"):
        _, _, done = game.step(move)
    assert (done, game.reward()) == (True, {"score": 1.0, "won": 1.0})


@pytest.mark.parametrize(("game", "name"), [("frozen_lake", "FrozenLake"), ("text_arena", "GuessTheNumber")])
def test_the_command_plays_rows_of_each_game(
    game: str, name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--kind", "environment", "--on", str(folder / game / "heldout.jsonl")]
    config = ["--config", str(EXAMPLES / f"{game}.yaml")]
    assert main(["plugins", "check", f"{EXAMPLES / game}.py:{name}", *words, *config]) == 0
    out = capsys.readouterr().out
    assert "offers:   step" in out
    assert out.count("reward {'score': 0.0, 'won': 0.0}") == 3


# -- a curriculum ----------------------------------------------------------------------------------


def test_each_level_makes_one_attribute_harder_in_turn() -> None:
    settings_of = load("curriculum").settings_of
    levels = [(settings_of(level)["max_terms"], settings_of(level)["max_digits"]) for level in range(4)]
    assert levels == [(2, 1), (3, 1), (3, 2), (4, 2)]
    with pytest.raises(ValueError, match="19 levels above the first"):
        settings_of(20)


def test_a_solved_level_is_followed_by_the_next_and_a_resumed_source_goes_on(tmp_path: Path) -> None:
    module = load("curriculum")
    check_contract("data_source", module.Curriculum)
    args = SimpleNamespace(run_dir=str(tmp_path), rollout_seed=1, n_samples_per_prompt=2)
    source = module.Curriculum(args)
    first = source.get_samples(3)
    assert [len(group) for group in first] == [2, 2, 2]
    assert first == module.Curriculum(args).get_samples(3)
    ticket = Ticket(rollout_id=0, evaluation=False, num_groups=3, version=0, incarnation="inc")
    buffer = FakeBuffer([], ticket)

    def reported(samples: list[list[Sample]], rewards: tuple[float, float]) -> Any:
        groups = []
        for row, group in enumerate(samples):
            made = [Sample(metadata=each.metadata, reward=reward) for each, reward in zip(group, rewards, strict=True)]
            groups.append(SampleGroup(uid=GroupUid("x", row, 0), samples=made))
        module.raise_level(SimpleNamespace(run_dir=str(tmp_path), reward_key=None), groups, buffer)
        return buffer.get_metadata().get("curriculum_level", 0)

    assert reported(first, (1.0, 0.3)) == 0  # 0.65 of 0.7
    assert source.get_samples(1)[0][0].metadata["level"] == 0
    assert reported(first, (1.0, 0.4)) == 1
    second = source.get_samples(1)
    assert second[0][0].metadata["level"] == 1
    assert reported(first, (1.0, 1.0)) == 1  # rewards of the level before
    source.save(str(tmp_path / "state"))
    resumed = module.Curriculum(SimpleNamespace(**{**vars(args), "run_dir": str(tmp_path / "other")}))
    resumed.load(str(tmp_path / "state"))
    assert resumed.get_samples(2) == source.get_samples(2)


# -- queues ----------------------------------------------------------------------------------------


async def test_an_agent_with_queues_plays_through_the_session() -> None:
    module = load("queues")
    counts = iter("123")
    engine = AgentEngine(lambda prompt, params: next(counts))
    wanted = SimpleNamespace(label="3")

    async def agent(args: Any, sample: Any, session: Any) -> float:
        answer: float = await module.play(args, SimpleNamespace(prompt="please", label=wanted.label), session)
        return answer

    fake, _ = await roll(agent, engine, num_samples=1)
    (sample,) = fake.finished[0]
    assert engine.prompts[-1] == "uplease count to 3a1<eos>ugo ona2<eos>ugo ona"
    assert (sample.reward, len(sample.rows)) == (pytest.approx(1.0), 1)


async def test_observations_may_be_token_ids_and_what_the_agent_raises_ends_the_play() -> None:
    module = load("queues")
    obs_queue, act_queue = asyncio.Queue[Any](), asyncio.Queue[Any]()

    async def generate(ids: list[int]) -> Any:
        return SimpleNamespace(output_ids=(7, 1))

    task = asyncio.ensure_future(module.answer(SimpleNamespace(generate=generate), obs_queue, act_queue))
    await obs_queue.put([3, 4])
    assert await act_queue.get() == (7, 1)
    task.cancel()
    with pytest.raises(ValueError, match="invalid literal"):
        await module.play(None, SimpleNamespace(prompt="go", label="none"), None)


def test_the_run_fails_if_too_few_are_won() -> None:
    verdict = load("run").verdict
    assert verdict([(0, 0.0), (60, 0.4)], 0.4) is None
    assert "0.390 of the held-out games are won; expected at least 0.4" in verdict([(0, 0.0), (60, 0.39)], 0.4)
    assert "1 evaluations have 'eval/heldout/won'" in verdict([(60, 0.9)], 0.4)
