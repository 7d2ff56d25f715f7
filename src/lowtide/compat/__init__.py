"""The only home of torch's private names, grouped by subject. Other folders reach them through here.

It imports nothing of lowtide but errors. A bound function costs its caller no Python call beyond torch's own.
"""
