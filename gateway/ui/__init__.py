"""The cockpit: pages for a browser, on `/` and below `/ui/`, over the same services as the JSON API.

    pages      the page itself and its files; nothing is loaded from other hosts
    sessions   sessions: a key, a signed cookie, a token against forged requests
    login      routes of login and logout
    api        routes of the pages beside the JSON API: overview, lists of queues, histories, tasks that move messages
    static/    the page: Preact components without a build step
    vendor/    libraries of others, with version, license and hash; `vendored` fetches and checks them

The page changes things only through the JSON API. May import `gateway`, `app` and `marq`.
"""
