"""Every page, link, filter and key, in a real browser."""

import re
from typing import Any

import pytest

from tests.browser.conftest import Visit

FIRST = "#/samples/first?step=5"


def test_the_runs_and_from_there_to_one(visit: Visit) -> None:
    visit.open()
    row = visit.page.locator('tr[data-run="first"]')
    assert row.locator(".status").inner_text() == "done" and "12 / 12" in row.inner_text()
    visit.counts("tbody tr", 4)
    visit.counts('tr[data-run="first"] .spark path', 1)
    visit.page.get_by_role("searchbox").fill("hack")
    visit.counts("tbody tr", 1)
    visit.page.get_by_role("searchbox").fill("")
    row.locator("a.name").click()
    visit.says("h1", "first")
    assert visit.hash == "#/monitor/first"


def test_the_address_bar_has_no_token_and_a_reload_works(visit: Visit) -> None:
    visit.open(FIRST)
    assert "token" not in visit.page.url
    visit.says("h2", "Group 0")
    visit.page.reload()
    visit.says("h2", "Group 0")
    assert visit.hash == FIRST


def test_curves_verdict_lanes_and_events_of_a_run(visit: Visit) -> None:
    visit.open("#/monitor/first")
    for title in ("Reward", "Held-out accuracy", "Outcomes", "Groups", "Entropy", "Mask", "Mismatch", "Gradient norm"):
        visit.says(".chart .title", title)
    visit.page.wait_for_selector(".verdict h2")
    visit.counts(".chart .dot", 4)
    visit.page.wait_for_selector(".lane")
    visit.says(".events li", "evaluation")
    visit.says(".spent", "points of reward")
    assert visit.says(".spent tr", "update").inner_text().split()[1:3] == ["4.8", "s"]
    assert visit.count(".chart:has-text('KL')") == 0


def test_each_of_several_actors_has_its_figures(visit: Visit) -> None:
    visit.open("#/monitor/second")
    visit.says(".actors tr", "box-1")
    rows = [row.split() for row in visit.page.locator(".actors tbody tr").all_inner_texts()]
    assert rows == [["box-1", "1234", "50", "%", "0", "11"], ["b/2", "90", "25", "%", "1", "12"]]
    visit.says(".actors", "link.credits costs the actors 25 % of their time")
    # Two decoded for 1 s together, and 0.525 s of the step are left beside scoring and update.
    now = visit.says(".chart:has-text('Step time') .now", "0.525 s \u00b7").inner_text()
    assert now.endswith("0.4 s \u00b7 0 s"), "nothing is left in which neither worked"
    visit.open("#/monitor/first")
    visit.says(".spent", "points of reward")
    assert visit.count(".actors table") == 0


def test_an_evaluation_is_one_point_at_its_own_step(visit: Visit) -> None:
    visit.open("#/monitor/second")
    chart = visit.says(".chart", "Held-out accuracy")
    assert chart.locator(".dot").count() == 4 and chart.locator(".line").count() == 0
    assert chart.locator(".now").inner_text() == "94 % \u00b7 94 %"
    words = chart.locator("svg").get_attribute("aria-label")
    assert words == "Held-out accuracy: greedy 31 % at step 1, 94 % at step 12"
    assert chart.locator(".key").all_inner_texts() == ["greedy", "sampled"]
    box = chart.locator(".plot").bounding_box()
    visit.page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 20)
    assert chart.locator(".now").inner_text() == "step 1: 31 % \u00b7 31 %"


def test_an_evaluation_shows_mean_rewards_where_they_say_more_than_the_accuracy(visit: Visit) -> None:
    visit.open("#/evaluate/hacked")
    table = visit.says(".evaluation", "final").locator("table").first
    assert table.locator("thead th").all_inner_texts()[-3:] == ["Length", "Reward", "Reward polite"]
    assert [row.split()[-2:] for row in table.locator("tbody tr").all_inner_texts()] == [["-", "-"], ["1.6", "1.5"]]
    visit.go("#/evaluate/first")
    visit.says("h1", "first")
    plain = visit.says(".evaluation", "final").locator("table").first
    assert plain.locator("thead th").all_inner_texts()[-1] == "Length"


def test_no_group_of_a_refused_step_is_trained_or_idle(visit: Visit) -> None:
    visit.open("#/monitor/second")
    chart = visit.says(".chart", "Groups")
    assert chart.locator(".now").inner_text() == "0 \u00b7 0 \u00b7 16"
    visit.go("#/monitor/second?first=1&last=11")
    visit.until("[...document.querySelectorAll('.chart .now')].some(now => now.textContent === '13 \u00b7 3 \u00b7 0')")


def test_one_brush_zooms_all_charts_and_is_in_the_address(visit: Visit) -> None:
    visit.open("#/monitor/long")
    plot = visit.says(".chart", "Gradient norm").locator(".plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    visit.page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 40)
    visit.page.mouse.down()
    visit.page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 40, steps=4)
    assert visit.page.locator(".brushed:visible").count() == visit.count(".chart")
    visit.page.mouse.up()
    visit.until("location.hash.includes('first=')")
    first, last = (int(found) for found in re.findall(r"=(\d+)", visit.hash))
    assert 2300 < first < 2700 and 3800 < last < 4200
    visit.until(f"[...document.querySelectorAll('.axis')].every(a => a.textContent.startsWith('{first}'))")
    visit.page.keyboard.press("Escape")
    visit.until("location.hash === '#/monitor/long'")


def test_the_cursor_stands_in_all_charts(visit: Visit) -> None:
    visit.open("#/monitor/first")
    visit.says(".chart", "Reward").locator(".plot").hover()
    assert visit.page.locator(".cross:visible").count() == visit.count(".chart")
    visit.says(".chart .now", "step ")


def test_steps_can_be_chosen_without_a_mouse(visit: Visit) -> None:
    visit.open("#/monitor/first")
    visit.page.get_by_label("From step").fill("4")
    visit.page.get_by_label("From step").press("Enter")
    visit.until("location.hash.includes('first=4')")


def test_groups_are_sorted_and_filtered(visit: Visit) -> None:
    visit.open(FIRST)
    visit.says("h2", "Group 0")
    visit.counts(".groups .one", 3)
    assert visit.page.locator(".one.idle .pill").inner_text() == "idle"
    assert visit.page.locator(".one.quarantined .pill").all_inner_texts() == ["quarantined", "2 stale"]
    for sort, top in {"untrained": "idle", "length": "trained", "order": "trained"}.items():
        visit.page.get_by_label("Order").select_option(sort)
        visit.until(f"location.hash.includes('sort={sort}')")
        visit.page.wait_for_selector(f".groups li:first-child .one.{top}")
    visit.page.get_by_role("button", name="truncated 1").click()
    visit.counts(".groups .one", 1)
    assert "outcome=truncated" in visit.hash
    visit.page.keyboard.press("Escape")
    visit.counts(".groups .one", 3)
    visit.page.get_by_role("button", name="idle 1").click()
    visit.counts(".groups .one", 1)
    visit.says(".about", "nothing is learned from it")


def test_a_bar_of_the_histogram_filters(visit: Visit) -> None:
    visit.open(FIRST)
    visit.says("h2", "Group 0")
    visit.page.get_by_role("button", name="1 answers with reward 0.25").click()
    visit.counts(".groups .one", 1)
    assert "reward=0.25_0.25" in visit.hash
    assert visit.page.locator(".answer.chosen").get_attribute("data-answer") == "2"
    visit.page.get_by_role("button", name="1 answers with reward 0.25").click()
    visit.counts(".groups .one", 3)


def test_answers_stand_side_by_side_with_the_parts_of_their_rewards(visit: Visit) -> None:
    visit.open(f"{FIRST}&group=0")
    card = visit.says(".answer", "Answer 0")
    visit.counts(".answer", 3)
    assert "+0.7" in card.inner_text() and "brevity" in card.inner_text()
    tops = {visit.page.locator(".answer").nth(place).bounding_box()["y"] for place in range(3)}
    assert len(tops) == 1
    visit.says(".gold", "54")
    visit.says(".answer", "cut off")


@pytest.mark.parametrize("colour", ["entropy", "mask", "ratio", "mismatch", "advantage", "actor"])
def test_tokens_are_coloured_and_their_figures_shown(visit: Visit, colour: str) -> None:
    visit.open(f"{FIRST}&group=0&sample=0&colour={colour}")
    visit.says(".tokens h2", "Answer 0")
    assert visit.page.get_by_label("Colour").input_value() == colour
    assert visit.page.locator(".tokens .t").last.inner_text() == "<|im_end|>"
    visit.counts(".tokens .t.special", 1)
    assert visit.page.evaluate("[...document.querySelectorAll('.t')].some(t => t.style.getPropertyValue('--a'))") == (
        colour != "ratio"
    )
    visit.page.locator(".tokens .t").nth(4).hover()
    said = visit.says(".tokens .figures", "token 4").inner_text()
    assert all(word in said for word in ("entropy 0.4", "mismatch", "ratio", "carried gradient", "advantage 0.7"))


def test_turns_of_an_environment_are_folded(visit: Visit) -> None:
    visit.open(f"{FIRST}&group=2&sample=0")
    visit.says(".tokens summary", "environment, turn 2")
    assert visit.page.evaluate("[...document.querySelectorAll('.tokens details')].map(d => d.open)") == [
        True,
        False,
        True,
    ]


def test_a_token_of_an_environment_has_no_probability(visit: Visit) -> None:
    visit.open(f"{FIRST}&group=2&sample=0&colour=actor")
    visit.page.locator(".tokens summary", has_text="environment").click()
    visit.page.locator(".tokens .environment .t").hover()
    said = visit.says(".tokens .figures", "token 2").inner_text()
    assert "not sampled" in said and "actor" not in said and "entropy" not in said
    visit.page.locator(".tokens .own .t").first.hover()
    said = visit.says(".tokens .figures", "token 0").inner_text()
    assert "p 1 actor" in said and "entropy 0" in said and "not sampled" not in said


def test_the_same_task_over_all_steps(visit: Visit) -> None:
    visit.open(f"{FIRST}&group=0")
    visit.says("h3", "This task in 12 steps")
    visit.page.locator(".over a", has_text="step 9").click()
    visit.until("location.hash.includes('step=9')")
    visit.says(".answer", "54 at step 9")


def test_a_text_is_searched_in_all_steps(visit: Visit) -> None:
    visit.open(FIRST)
    visit.page.keyboard.press("/")
    visit.page.keyboard.type("at step 7")
    visit.page.keyboard.press("Enter")
    visit.says(".found h2", "1 places")
    visit.page.locator(".found a").click()
    visit.until("location.hash.includes('step=7')")
    visit.says(".answer.chosen", "54 at step 7")


def test_a_key_may_come_before_the_answers(visit: Visit) -> None:
    held: list[Any] = []
    visit.page.route("**/steps/5?*", lambda route: held.append(route))
    visit.open(FIRST)
    visit.page.keyboard.press("J")
    visit.page.keyboard.press("/")
    visit.page.keyboard.type("at step ")
    assert held and "sort" not in visit.hash
    for one in held:
        one.continue_()
    visit.says(".bar h1", "first")
    visit.says("h2", "Group 0")
    visit.page.keyboard.type("7")
    visit.page.keyboard.press("Enter")
    visit.says(".found h2", "1 places")


def test_what_is_wrong_stays_when_the_page_before_is_done(visit: Visit) -> None:
    held = visit.held("**/steps/5/*/*?*")
    visit.open("#/samples/first?step=5")
    visit.says(".answer.chosen", "at step 5")
    visit.go("#/monitor/nowhere")
    visit.says(".problem", "no run 'nowhere'")
    held.let_through()
    assert visit.page.locator(".problem").is_visible()
    assert len(visit.errors) == 1 and "404" in visit.errors[0]
    visit.errors.clear()


def test_the_steps_that_were_chosen_last_are_shown(visit: Visit) -> None:
    held = visit.held("**/curves?*first=3&*")
    visit.open("#/monitor/first")
    visit.go("#/monitor/first?first=3&last=9")
    visit.until("document.querySelector('.tools button').disabled")
    visit.go("#/monitor/first?first=4&last=6")
    visit.until("document.querySelector('.tools input').value === '4'")
    held.let_through()
    assert visit.page.locator(".tools input").first.input_value() == "4"


def test_the_runs_that_were_chosen_last_are_compared(visit: Visit) -> None:
    held = visit.held("**/compare?*hacked*")
    visit.open("#/compare?runs=first/hacked")
    visit.go("#/compare?runs=first/second")
    visit.says("h2", "Held-out accuracy")
    visit.until("document.querySelectorAll('.compare canvas, .compare svg').length > 0")
    before = visit.page.locator(".tables").inner_text()
    held.let_through()
    assert visit.page.locator(".tables").inner_text() == before


def test_what_was_searched_for_last_is_shown(visit: Visit) -> None:
    held = visit.held("**/search?*step+7*")
    visit.open(FIRST)
    search = visit.page.get_by_label("Search prompts")
    for text in ("at step 7", "at step 9"):
        search.fill(text)
        search.press("Enter")
    visit.says(".found a", "step 9")
    held.let_through()
    visit.says(".found h2", "at step 9")


def test_keys_walk_through_steps_groups_answers_and_colours(visit: Visit) -> None:
    visit.open(FIRST)
    visit.says("h2", "Group 0")
    press = visit.page.keyboard.press
    wait = visit.until
    press("j")
    wait("location.hash.includes('step=6')")
    # The step before is shown until this one has been read.
    visit.says(".answer", "at step 6")
    press("k")
    wait("location.hash.includes('step=5')")
    visit.says(".answer", "54 at step 5")
    press("l")
    wait("location.hash.includes('sample=1')")
    press("h")
    wait("location.hash.includes('sample=0')")
    press("J")
    wait("location.hash.includes('group=2')")
    press("K")
    wait("location.hash.includes('group=0')")
    press("c")
    wait("location.hash.includes('colour=mask')")
    press("s")
    wait("location.hash.includes('sort=untrained')")
    press("?")
    visit.says("dialog", "next and previous step")
    press("Escape")
    press("g")
    press("r")
    visit.says("h1", "Runs")


def test_back_goes_back(visit: Visit) -> None:
    visit.open(FIRST)
    visit.says("h2", "Group 0")
    visit.page.keyboard.press("j")
    visit.until("location.hash.includes('step=6')")
    visit.page.go_back()
    visit.until("location.hash.includes('step=5')")
    visit.says(".answer", "54 at step 5")


def test_two_runs_beside_each_other(visit: Visit) -> None:
    visit.open()
    for name in ("first", "second"):
        visit.page.get_by_label(f"Compare {name}").check()
    visit.page.get_by_role("button", name="Compare 2").click()
    visit.says("h2", "All have the same configuration")
    visit.says("th", "Points, 97.5 % interval")
    visit.says("td", "second is better")
    visit.says(".chart", "Reward")
    assert visit.count(".chart .line.c1") > 3
    visit.says("summary", "in first alone 0, in second alone 20")
    visit.says(".two", "says final")
    visit.page.get_by_label("long").check()
    visit.says("code", "run.steps")


def test_a_damaged_run_and_a_wrong_address_say_what_is_wrong(visit: Visit) -> None:
    visit.open("#/monitor/nothing")
    visit.says(".problem", "There is no run 'nothing'")
    visit.go("#/samples/first?step=999")
    visit.says(".problem", "Step 999 has no groups")
    visit.go("#/samples/first?step=x")
    visit.says(".problem", "expected a whole number")
    visit.errors.clear()  # Chromium reports each answer 404.
