import json

from lowtide.reporting.embed import embed, pack
from lowtide.reporting.palette import STACK


def test_the_packed_timeline_and_names_are_the_profiles(profile):
    packed = pack(profile)
    for category, differences in zip(STACK, packed["live"], strict=True):
        live = [sum(differences[: i + 1]) for i in range(len(differences))]
        assert live == profile.timeline.by_category[category].tolist()
    assert packed["peak_bytes"] == profile.peak_bytes
    assert [packed["strings"][i] for i in packed["ops"]["name"]] == [op.name for op in profile.graph.ops]


def test_the_packed_storages_tell_which_are_alive_at_the_peak(profile):
    packed = pack(profile)
    storages = packed["storages"]
    alive = [
        packed["strings"][label]
        for label, birth, death in zip(storages["label"], storages["birth"], storages["death"], strict=True)
        if birth <= packed["peak_op"] < death
    ]
    assert alive == [s.label for s in profile.alive_at_peak]


def test_names_cannot_end_the_script_element(make_profile):
    text = embed([make_profile(name="</script><b>&")])
    assert not set("<>&") & set(text)
    assert json.loads(text)["profiles"][0]["name"] == "</script><b>&"


def test_a_long_step_stays_small(make_profile):
    profile = make_profile(blocks=1000)
    assert len(profile.graph.ops) == 5000
    assert len(embed([profile])) < 3_000_000
