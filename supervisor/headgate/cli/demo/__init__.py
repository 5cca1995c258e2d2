"""``headgate demo``: the main job with kills."""
