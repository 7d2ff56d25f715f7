"""The only home of torch's private names, grouped by subject. Other folders reach them through here.

It imports nothing of lowtide but errors. ``versions.Feature`` says on which versions names were seen.
A name that this torch lacks breaks the feature that uses it, not the import. A bound function costs its caller no
Python call beyond torch's own.
"""
