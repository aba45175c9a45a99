"""`watch RUN`: the answers of a run in a terminal, for people on ssh; also while it trains.

    +-----------------------------+------------------------------------------+
    | first  step 12  running     |  learning: reward 0.61 at first, ...     |
    | groups of the step          |  prompt, gold answer                     |
    |  #  fate  reward  outcomes  |  answer 2 of 8: wrong, advantage -0.71   |
    |  0  trained  ..             |  tokens, coloured                        |
    +-----------------------------+------------------------------------------+

    j k  step    up down  group    h l  answer    c  colour    o  order of the groups    /  search    q  quit

It follows the newest step until another one is chosen. Nothing is written. Texts of models are shown with their control
characters escaped, and never read as markup. Left out on purpose: curves, which the live display and the page have.
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false

from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import DataTable, Footer, Input, Static

from launch.display.terminal.group_text import COLOURS, COLUMNS, ORDERS, group_row, group_text, ordered, title
from launch.why.command import KeptVerdicts
from shared.run.reader import Run
from shared.run.rollout_index import Found

LOOK_EVERY_S = 2.0


class Watcher(App[None]):
    """Shows one group of one step."""

    CSS = "DataTable { width: 45%; } #search { display: none; } #title { height: auto; max-height: 4; }"
    BINDINGS: ClassVar[Any] = [
        *(("j", "step(1)", "later"), ("k", "step(-1)", "earlier"), ("l", "answer(1)", "answer")),
        *(("h", "answer(-1)", "before"), ("c", "colour", "colour"), ("o", "order", "order")),
        *(("slash", "search", "search"), ("q", "quit", "quit")),
    ]

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.shown, self.verdicts = run, KeptVerdicts(run)
        self.step, self.number, self.sample = 0, 0, 0
        self.follows = True
        self.colours, self.orders = list(COLOURS), list(ORDERS)

    def compose(self) -> ComposeResult:
        yield Static(id="title")
        with Horizontal():
            yield DataTable(cursor_type="row")
            with VerticalScroll():
                yield Static(id="group")
        yield Input(id="search", placeholder="search all steps")
        yield Footer()

    def on_mount(self) -> None:
        table = self.query_one(DataTable)
        table.add_columns(*COLUMNS)
        table.focus()
        self.look()
        self.set_interval(LOOK_EVERY_S, self.look)

    def look(self) -> None:
        """At what is new, if the newest step is what is shown."""
        if not self.query("#title"):
            # The timer may tick once more when the program ends, after its widgets have gone.
            return
        steps = self.shown.rollouts.steps()
        if steps and self.follows and self.step != steps[-1]:
            self.go(steps[-1], 0, 0)
        self.show_title()

    def go(self, step: int, number: int, sample: int) -> None:
        heads, table = self.shown.rollouts.heads(step), self.query_one(DataTable)
        places = ordered(heads, self.orders[0])
        if places and number not in places:
            # That group cannot be read.
            number, sample = places[0], 0
        self.step, self.number, self.sample = step, number, sample
        # A table that is filled highlights its first row, which nobody chose.
        with table.prevent(DataTable.RowHighlighted):
            table.clear()
            for place in places:
                table.add_row(*(Text(cell) for cell in group_row(place, heads[place])), key=str(place))
            if places:
                table.move_cursor(row=places.index(number))
        self.draw()

    def draw(self) -> None:
        group = self.shown.rollouts.group(self.step, self.number)
        there = group is not None and self.sample < len(group.samples)
        shown = group_text(group, self.sample, self.colours[0]) if group and there else Text("no group")
        self.query_one("#group", Static).update(shown)
        self.show_title()

    def show_title(self) -> None:
        first = self.verdicts.of(self.shown.stamp())[0]
        self.query_one("#title", Static).update(title(self.shown, self.step, first))

    def on_data_table_row_highlighted(self, event: Any) -> None:
        place = int(event.row_key.value)
        if place != self.number:
            self.number, self.sample = place, 0
            self.draw()

    def action_step(self, by: int) -> None:
        steps = self.shown.rollouts.steps()
        if steps:
            place = steps.index(self.step) + by if self.step in steps else 0
            place = max(0, min(len(steps) - 1, place))
            self.follows = place == len(steps) - 1
            self.go(steps[place], 0, 0)

    def action_answer(self, by: int) -> None:
        if group := self.shown.rollouts.group(self.step, self.number):
            self.sample = (self.sample + by) % max(1, len(group.samples))
            self.draw()

    def action_colour(self) -> None:
        self.colours = [*self.colours[1:], self.colours[0]]
        self.draw()

    def action_order(self) -> None:
        self.orders = [*self.orders[1:], self.orders[0]]
        self.go(self.step, self.number, self.sample)
        self.notify(self.orders[0])

    def action_search(self) -> None:
        box = self.query_one("#search", Input)
        box.display = True
        box.focus()

    def on_input_submitted(self, event: Any) -> None:
        """The first hit after the group that is shown, or the first of all."""
        event.input.display = False
        self.query_one(DataTable).focus()
        found = self.hit(event.value) if event.value else None
        if found is None:
            self.notify("nothing found", severity="warning")
            return
        self.follows = False
        self.go(found.step, found.number, found.sample or 0)

    def hit(self, text: str) -> Found | None:
        """The next group with this text, or else the first."""
        hits = self.shown.rollouts.search(text, first=self.step)
        later = (one for one in hits if (one.step, one.number) > (self.step, self.number))
        return next(later, None) or next(self.shown.rollouts.search(text), None)
