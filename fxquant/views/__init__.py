"""Views of plans and reports for people: one self-contained HTML page."""
