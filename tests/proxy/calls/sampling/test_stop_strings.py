"""Stop strings cut the delivered text, however the stream is split."""

from hypothesis import given
from hypothesis import strategies as st

from agentrl.proxy.calls.sampling.stop_strings import Delivered
from agentrl.rendering import ContentDelta, ParsedOutput


@given(
    text=st.text("abAB\n", max_size=20),
    stops=st.lists(st.text("abAB\n", min_size=1, max_size=4), max_size=3),
    data=st.data(),
)
def test_every_split_ends_before_the_stop_that_is_complete_first(text, stops, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    stop = Delivered(stops)
    sent = [delta for piece in pieces for delta in stop.push([ContentDelta(piece)])]
    end = stop.finish(ParsedOutput(text, None, [], []))
    found = [(at + len(s), at) for s in stops if (at := text.find(s)) >= 0]
    expected = text[: min(found)[1]] if found else text
    assert end.content == expected
    assert "".join(d.text for d in sent + end.deltas) == expected
