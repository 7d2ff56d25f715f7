"""Read pages and charts as a browser would."""

import json
from html.parser import HTMLParser


class Document(HTMLParser):
    """The elements of a page, and the text of its scripts."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts, self._inside = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._inside = False

    def handle_data(self, data):
        if self._inside:
            self.scripts[-1] += data

    @property
    def data(self):
        return next(json.loads(text) for text in self.scripts if text.startswith('{"categories"'))


def rows(chart, layer=0, row=None):
    """The data of a layer, of one chart in a column if ``row`` is given. Altair stores it apart, under a name."""
    specification = json.loads(chart.to_json())
    part = specification if row is None else specification["vconcat"][row]
    data = part["layer"][layer].get("data") or part["data"]
    return json.loads(specification["datasets"][data["name"]])


def heights(drawn):
    """The height of a stack of areas over each op."""
    stacked = {}
    for row in drawn:
        stacked[row["op"]] = stacked.get(row["op"], 0) + row["size"]
    return stacked
