"""The dashboard: pages of HTML that show runs, served by the proxy under `/ui` and by `agentrl ui`.

request ─► dashboard_app ─► sign_in (cookie ─► Viewer) ─► pages/… ─► store views ─► templates/… ─► HTML
                                                                 └► pictures/…  (SVG)
browser ─► live_updates (one watcher a run) ─► "changed" ─► the page again ─► its parts are replaced

Text of models, tools and agents is inert: templates escape it, `page_rendering` spells out control characters, and the
Content-Security-Policy allows this server's own scripts and styles alone.
"""
