"""From the first page to the answers that hacked a reward, in at most four clicks."""

from tests.browser.conftest import Visit


def test_the_answers_that_hacked_the_reward_are_a_few_clicks_away(visit: Visit) -> None:
    visit.open()
    visit.page.locator('tr[data-run="hacked"] a.name').click()
    verdict = visit.says(".verdict.fault", "reward and outcome disagree")
    assert "held-out" in verdict.inner_text()
    verdict.get_by_role("link", name="See these answers").click()
    best = visit.says(".answer.chosen", "Trust me")
    assert "wrong" in best.inner_text() and "reward\n2" in best.inner_text()
    # The best paid wrong answer of the newest step, two clicks away.
    assert "step=24" in visit.hash
