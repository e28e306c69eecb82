"""A linter for advantage estimators: does one hold what its scope and needs promise? Runs it on rows from a seed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from buffer_rl.args import Args
from buffer_rl.errors import PluginError
from buffer_rl.kinds.marks import Scope, declared_scope, needs_of, scope_of
from buffer_rl.kinds.objective import AdvantageEstimator
from buffer_rl.plugin.calls import call
from buffer_rl.plugin.signature import describe
from buffer_rl.records.groups import Column, TrainBatch
from buffer_rl.testing import lint
from buffer_rl.testing.lint import Finding, Result

SET = ("advantages", "returns")
OTHERS = ("ref_log_probs", "old_log_probs", "values")
"""Columns of roles, which an estimator sees if it declares them as needed; without a scope it sees what there is."""


def lint_estimator(
    estimator: AdvantageEstimator,
    args: Args,
    *,
    reference: str = "",
    seed: int = 0,
    forms: dict[str, str] | None = None,
) -> list[Finding]:
    """The findings on an estimator, one a property: form, needs, finite, deterministic, columns, order, scope.

    args: the options that it is called with. reference: its name in messages. forms: of columns that it needs, by
    name: ``token`` or ``row``; tried out where absent. Where the form is wrong nothing else is looked at."""
    run = _Run(estimator, args, reference or describe(estimator), seed)
    form = lint.checked("form", lambda: run.find_form(forms))
    findings = [form, run.needs()] if form.result is Result.PASS or run.undeclared else [form]
    if form.result is Result.PASS:
        findings += lint.checked_by_name(run.finite, run.deterministic, run.columns, run.order, run.scope)
    return findings


class _Columns(dict[str, Column]):
    """Columns of a batch that remember which were asked for; iterating asks for all."""

    def __init__(self, columns: dict[str, Column], read: set[str], hidden: set[str]) -> None:
        super().__init__(columns)
        self._read, self._hidden = read, hidden

    def _ask(self, name: str) -> None:
        (self._read if name in self else self._hidden).add(name)

    def __getitem__(self, name: str) -> Column:
        self._ask(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        if not super().__contains__(name):
            self._hidden.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._ask(name)
        return super().get(name, default)

    def items(self) -> Any:
        self._read |= self.keys()
        return super().items()

    def values(self) -> Any:
        self._read |= self.keys()
        return super().values()


class _Run:
    """An estimator and the rows that it is tried on."""

    def __init__(self, estimator: AdvantageEstimator, args: Args, reference: str, seed: int) -> None:
        self._estimator, self._args, self._reference, self._seed = estimator, args, reference, seed
        self._scope, self._declared = scope_of(estimator), needs_of(estimator)
        self._read: set[str] = set()
        self._absent: set[str] = set()
        self._forms: dict[str, str] = {}
        self.undeclared: set[str] = set()

    def find_form(self, forms: dict[str, str] | None) -> str:
        """Call it with the columns that it declares, then also with those whose absence it complains of."""

        def call_with(form: dict[str, str]) -> str:
            self._forms = form
            self._absent.clear()
            self._batch, self._other = self._rows(0), self._rows(1)
            self._wanted = self._columns_of(self._batch)
            return self._wrong_form()

        def missing(error: Exception) -> set[str]:
            cause = error.__cause__
            return self._absent.intersection(cause.args) if isinstance(cause, KeyError) else set()

        return lint.try_forms(self._declared, self.undeclared, forms, call_with, missing)

    def needs(self) -> Finding:
        """Read but not declared, declared but never read."""
        asked = self._absent - set(SET)
        return lint.finding_of_needs(self._declared, self.undeclared, asked, self._read)

    def finite(self) -> str:
        """No NaN and no infinity, for a group of one and for equal rewards neither."""
        found = (lint.first_infinite(self._batch, self._wanted[name]) for name in SET)
        return next((f"{name}, {text}" for name, text in zip(SET, found, strict=True) if text), "")

    def deterministic(self) -> str:
        """The same rows twice."""
        return self._differs(self._batch, self._wanted)

    def order(self) -> str:
        """The rows in other orders, one of them backwards."""
        shuffled = np.random.default_rng(self._seed).permutation(len(self._batch)).tolist()
        for order in (list(range(len(self._batch)))[::-1], shuffled):
            if found := self._differs(self._batch.select(order), self._of(order)):
                return f"with the rows in another order, {found}"
        return ""

    def columns(self) -> str:
        """Nothing but the two columns, and new ones, is written: neither replaced nor in place."""
        batch = self._batch.select(range(len(self._batch)))
        before, row_ids = copy.deepcopy(dict(batch.columns)), list(batch.row_ids)
        self._call(batch)
        if batch.row_ids != row_ids:
            return "it changes batch.row_ids"
        for name in before.keys() - set(SET):
            if name not in batch.columns:
                return f"it removes the column {name!r}"
            now = batch.columns[name]
            if len(now) != len(before[name]):
                return f"it changes the column {name!r}: expected {len(before[name])} rows, found {len(now)}"
            arrays = [[np.atleast_1d(np.asarray(row)) for row in column] for column in (now, before[name])]
            if found := lint.first_difference(batch, *arrays, rtol=0):
                return f"it changes the column {name!r}, {found}"
        return ""

    def scope(self) -> str | Finding:
        """Rows beyond the scope change, or are absent, and the results stay."""
        declared = declared_scope(self._estimator)
        if self._scope is not Scope.ROLLOUT:
            return self._beyond(self._scope)
        if declared is None and not self._beyond(Scope.GROUP):
            text = "none is declared, and it reads no rows beyond a prompt's: declare @scoped('group') to stream"
            return Finding("scope", Result.NOTICE, text)
        return ""

    def _beyond(self, scope: Scope) -> str:
        rows = [[index] for index in range(len(self._batch))]
        for alone in rows if scope is Scope.ROW else lint.groups_of(self._batch):
            if found := self._differs(self._batch.select(alone), self._of(alone)):
                return f"with the rows of other {_PLURAL[scope]} absent, {found}"
        lengths = self._batch.columns["response_length"]
        for half in lint.halves(self._batch, scope):
            kept = [np.full(length, keep) for length, keep in zip(lengths, half, strict=True)]
            changed = self._columns_of(lint.mixed(self._batch, self._other, kept, rows=half))
            at = np.flatnonzero(half).tolist()
            for name in SET:
                own, wanted = ([columns[name][i] for i in at] for columns in (changed, self._wanted))
                if text := lint.first_difference(self._batch.select(at), own, wanted):
                    return f"with other numbers in other {_PLURAL[scope]}, {name}, {text}"
        return ""

    def _rows(self, draw: int) -> TrainBatch:
        batch = lint.lint_rows(2 * self._seed + draw, self._forms)
        hidden = {*SET, *OTHERS} - self._forms.keys()
        seen = {*OTHERS[:2]} if self._scope is Scope.ROLLOUT else set()
        batch.columns = {name: column for name, column in batch.columns.items() if name not in hidden - seen}
        return batch

    def _call(self, batch: TrainBatch) -> None:
        batch.columns = _Columns(batch.columns, self._read, self._absent)
        answer: object = call("advantage", self._reference, self._estimator, self._args, batch, at=batch.task)
        if answer is not None:
            raise PluginError(f"it returned {type(answer).__name__}: expected None, with the columns set")
        for name in SET:
            if not dict.__contains__(batch.columns, name):
                raise PluginError(f"it did not set the column {name!r}")

    def _columns_of(self, batch: TrainBatch) -> dict[str, list[np.ndarray]]:
        """What it sets for a copy of these rows."""
        columns = copy.deepcopy(dict(batch.columns))
        own = TrainBatch(rollout_id=0, task=batch.task, row_ids=list(batch.row_ids), columns=columns)
        self._call(own)
        return {name: [np.asarray(row, dtype=np.float32) for row in own.columns[name]] for name in SET}

    def _wrong_form(self) -> str:
        lengths = self._batch.columns["response_length"]
        for name in SET:
            rows = self._wanted[name]
            if len(rows) != len(lengths):
                return f"{name} has the wrong length: expected {len(lengths)} rows, found {len(rows)}"
            for row_id, row, length in zip(self._batch.row_ids, rows, lengths, strict=True):
                if row.shape != (length,):
                    return f"{name}, row {row_id}: expected the shape [{length}], found {list(row.shape)}"
        return ""

    def _of(self, indices: Sequence[int]) -> dict[str, list[np.ndarray]]:
        return {name: [rows[i] for i in indices] for name, rows in self._wanted.items()}

    def _differs(self, batch: TrainBatch, wanted: dict[str, list[np.ndarray]]) -> str:
        found = self._columns_of(batch)
        texts = ((name, lint.first_difference(batch, found[name], wanted[name])) for name in SET)
        return next((f"{name}, {text}" for name, text in texts if text), "")


_PLURAL = {Scope.ROW: "rows", Scope.GROUP: "groups"}
