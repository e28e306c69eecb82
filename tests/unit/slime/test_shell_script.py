"""Scripts are read as bash reads them, and never run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from buffer_rl.errors import ConfigError
from buffer_rl_slime.scripts.shell_script import Script, read_script
from buffer_rl_slime.scripts.shell_values import as_run, holds, is_computed, removed, shown

PRINTS = 'python3() { shift; printf "%s\\n" "$@"; }\n'
AS_BASH = {
    "arrays, comments and continuation lines": """\
        A=(
           --one 1   # the first
           #--two 2
           --name "two words" 'single $X'
        )
        B=()
        python3 train.py ${B[@]} \\
           "${A[@]}" \\
           --end""",
    "unquoted elements are split": 'A=("a b" c); python3 train.py ${A[@]} ${A[0]} ${#A[@]}',
    "arrays grow": 'A=(1); A+=(2 3); X=a; X+=b; python3 train.py "${A[@]}" "$X"',
    "defaults": 'X=${X:-one}; Y="${Y:-"two ${X}"}"; : ${Z:=3}; python3 train.py $X "$Y" $Z ${X:+set} ${N:+set} ${N-d}',
    "ends are removed": "P=/a/b.tar.gz; python3 train.py ${P##*/} ${P%.*} ${P%%.*} ${P#/} ${#P}",
    "arithmetic": "N=7; python3 train.py $((N * 2 - 1)) $(( $N / 2 )) $((4 * 512 * 1024)) $(( (N + 1) % 3 ))",
    "division is towards zero": "N=-7; python3 train.py $((N / 2)) $((N % 3)) $((7 / N)) $((7 % -3))",
    "texts that commands compute": 'python3 train.py $(seq 2 3 11) $(dirname /a/b) "$(basename /a/b.sh .sh)" `echo x`',
    "an empty array in quotes is no word": 'E=(); python3 train.py "${E[@]}" "" a"$U"b',
    "branches that follow": """\
        N=8
        if [ "$N" -gt 4 ] && [ -z "$U" ]; then A=(big); elif [[ $N == 4 ]]; then A=(four); else A=(small); fi
        [ -n "$U" ] && A+=(--u)
        [[ $N == 8 || -n $U ]] && A+=(--eight)
        if (( N > 9 )); then A+=(--nine); fi
        python3 train.py "${A[@]}" """,
    "here-documents are no commands": """\
        cat > /dev/null <<EOF
        python3 train.py wrong "
        EOF
        python3 train.py right""",
    "adjacent pieces are one word": "X='a b'; python3 train.py --x=$X'c d'\"$X\" pre${X}post",
    "printed where it is written": 'Q="{\\"a\\": \\"$HOME_OF\\"}"; python3 train.py --json="${Q}"',
    "functions, read where they stand": 'A=(1)\nstart() {\n  python3 train.py "${A[@]}"\n}\nfalse || start',
}


@pytest.mark.parametrize("name", AS_BASH)
def test_a_script_starts_what_bash_would_start(name: str, tmp_path: Path) -> None:
    script = "\n".join(line.removeprefix(" " * 8) for line in AS_BASH[name].splitlines())
    done = subprocess.run(
        ["bash"], input=PRINTS + script, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=True
    )
    assert [as_run(text) for text in arguments(tmp_path, script)] == done.stdout.removesuffix("\n").split("\n")


def read(folder: Path, text: str, **given: str) -> Script:
    path = folder / "run.sh"
    path.write_text(text)
    return read_script(str(path), given)


def arguments(folder: Path, text: str, **given: str) -> list[str]:
    (launch,) = read(folder, text, **given).launches
    return [argument.text for argument in launch.arguments]


def test_nothing_in_a_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = arguments(
        tmp_path,
        "touch ran\nX=$(touch ran; echo 1)\nY=`touch ran`\nif touch ran; then touch ran; fi\neval 'touch ran'\n"
        'source <(touch ran)\nbash -c "touch ran"\ntouch ran & \npython3 train.py $X "$Y" $(touch ran) > ran\n',
    )
    assert not (tmp_path / "ran").exists()
    assert [is_computed(text) for text in found] == [True, True, True]


def test_values_that_only_a_run_knows_keep_the_name_of_their_variable(tmp_path: Path) -> None:
    text = "N=$(nvidia-smi -L | wc -l)\nM=${M:-$N}\nif [ -z $M ]; then M=8; fi\nP=$BASE/x\npython3 train.py $M $P\n"
    assert [shown(each) for each in arguments(tmp_path, text)] == ["${M}", "${BASE}/x"]
    assert arguments(tmp_path, text, N="4", BASE="/d") == ["4", "/d/x"]
    assert arguments(tmp_path, text, M="2", BASE="/d") == ["2", "/d/x"]


def test_the_scripts_own_folder_and_the_files_that_it_sources_are_found(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "m.sh").write_text("MODEL=(\n  --layers ${L:-3}\n)")
    (tmp_path / "scripts").mkdir()
    script = read(
        tmp_path / "scripts",
        'D="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." &>/dev/null && pwd)"\nL=5\nsource "${D}/models/m.sh"\n'
        "ray job submit --address=http://x -- python3 -u train.py ${MODEL[@]} --here $D 2>&1 | tee log\n",
    )
    (launch,) = script.launches
    assert [each.text for each in launch.arguments] == ["--layers", "5", "--here", str(tmp_path)]
    assert launch.arguments[0].where == f"{tmp_path}/models/m.sh:2"
    assert launch.where == f"{tmp_path}/scripts/run.sh:4"
    assert launch.words[3].text == "--address=http://x"
    assert script.notices == ()


def test_what_cannot_be_followed_is_said(tmp_path: Path) -> None:
    script = read(
        tmp_path,
        "source /no/models/m.sh\n. /no/other.sh\nif command -v x; then A=(--a); fi\nB=(1 2)\nB[0]=--b\n"
        'python3 train.py "${A[@]}" "${B[@]}" \n  --lost 1\n',
    )
    assert [each.text for each in script.launches[0].arguments] == ["--a", "1", "2"]
    notices = [notice.removeprefix(f"{tmp_path}/run.sh:") for notice in script.notices]
    assert [notice.split(":")[0] for notice in notices] == ["1", "2", "3", "5", "7"]
    for notice, words in zip(
        notices, ("model's shape", "its flags", "A is filled", "element of B", "backslash"), strict=True
    ):
        assert words in notice


def test_a_loop_leaves_what_it_sets_unknown(tmp_path: Path) -> None:
    text = "L=()\nX=0\nfor ((i=0; i<3; i++)); do X=$i; L+=($i); done\ncase $1 in a) Y=1;; *) Y=2;; esac\n"
    script = read(tmp_path, text + 'printf -v F "[%s]" 1\npython3 train.py $X $Y "$F" ok\n')
    assert [is_computed(each.text) for each in script.launches[0].arguments] == [True, True, True, False]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('echo\nX="open', ["run.sh:2", "quote", "never closed"]),
        ("A=(\n 1", ["run.sh:1", "array", "never closed"]),
        ("if true; then\nX=1", ["run.sh:1", "'fi'"]),
        ("source ./run.sh", ["too often"]),
        ("X=${Y", ["'{'"]),
        ("X=ab\n" + "X=$X$X\n" * 40, ["X grows beyond"]),
        ("A=(1 2)\n" + 'A+=("${A[@]}")\n' * 40, ["A grows beyond"]),
        ("eval 'eval \"eval :\"'\n" * 100, ["too often"]),
    ],
)
def test_a_script_that_is_none_is_an_error_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.timeout(60)
def test_a_large_script_is_read_in_seconds(tmp_path: Path) -> None:
    text = "X=1\nA+=(--flag $X)\n" * 5_000
    script = read(tmp_path, f"{text}python3 train.py ${{A[@]}}")
    assert script.launches[0].arguments[-1].where.endswith(":10000")


def test_files_that_are_no_scripts_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "large").write_text("#" * (1 << 20) + "\n")
    for name, word in (("binary", "UTF-8"), ("large", "1 MiB"), ("absent", "cannot read"), (".", "cannot read")):
        with pytest.raises(ConfigError, match=word):
            read_script(str(tmp_path / name), {})


def test_a_test_that_depends_on_files_or_commands_is_undecided() -> None:
    assert holds(["-f", "/etc/passwd"]) is None
    assert holds(["-f", "x", "&&", "-n", ""]) is False
    assert holds(["-f", "x", "||", "a", "=", "a"]) is True
    assert holds(["!", "-z", ""]) is False
    assert holds(["abc", "==", "a*"]) is True
    assert holds(["a", "-lt", "2"]) is None
    assert removed("a.b.c", "%", ".*") == "a.b"
    assert removed("abc", "##", "x*") == "abc"
