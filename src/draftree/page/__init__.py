"""The page that draws traces: all of it is the server's inspector, and its views are what ``show`` draws."""
