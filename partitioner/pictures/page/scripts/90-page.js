// The page: which sections there are, drawn one after another so that the first is on the screen at once.

const SECTIONS = [
  {
    id: 'summary',
    title: 'Summary',
    lead: 'What this plan does, how long a step takes, and how sure that is.',
    has: () => true,
    draw: drawSummary,
  },
  {
    id: 'graph',
    title: 'Placement graph',
    lead: 'The model as modules and ops. Colour, shape and number say which stage, and so which devices, compute what.',
    has: () => true,
    draw: drawPlacement,
  },
  {
    id: 'devices',
    title: 'Devices',
    lead: 'The cluster, what lies where, and how much every link carries.',
    has: (plan) => plan.devices,
    draw: drawDevices,
  },
  {
    id: 'timeline',
    title: 'Timeline',
    lead: 'One step from left to right. Ranks that do the same share a lane.',
    has: (plan) => plan.timeline && plan.timeline.lanes.length,
    draw: drawTimeline,
  },
  {
    id: 'memory',
    title: 'Memory',
    lead: 'What the devices hold over a step.',
    has: (plan) => plan.memory,
    draw: drawMemory,
  },
  {
    id: 'traffic',
    title: 'Traffic',
    lead: 'How many bytes go from where to where in a step.',
    has: (plan) => plan.traffic,
    draw: drawTraffic,
  },
  {
    id: 'what-if',
    title: 'What if',
    lead: 'The step time if one thing were otherwise.',
    has: (plan) => plan.what_if && plan.what_if.series.length,
    draw: drawWhatIf,
  },
];

const shownTasks = new Map();

/** Do something once an element has a size on the screen. */
function afterShown(element, task) {
  shownTasks.set(element, task);
}

function runShown() {
  for (const [element, task] of shownTasks) {
    if (!element.isConnected) continue;
    shownTasks.delete(element);
    task();
  }
}

function planName(plan, index) {
  return el('p', {class: 'plan-name'}, el('span', {class: 'letter'}, 'AB'[index]), short(plan.title, 300));
}

function drawSection(section) {
  const plans = report.plans;
  const parts = plans.map((plan, index) => {
    const content = section.has(plan)
      ? drawOrExcuse(section, plan, twoPlans ? plans[1 - index] : null)
      : [el('p', {class: 'note'}, 'This plan has nothing to show here.')];
    return el('div', null, twoPlans && planName(plan, index), ...content.filter(Boolean));
  });
  document.getElementById(section.id).append(el('div', {class: `columns${twoPlans ? ' two' : ''}`}, parts));
  runShown();
}

/** Draw a section; one that fails says so and leaves the others alone. */
function drawOrExcuse(section, plan, other) {
  try {
    return section.draw(plan, other);
  } catch (error) {
    console.error(error);
    return [el('p', {class: 'note'}, `This section could not be drawn: ${error.message}`)];
  }
}

function drawDifferences() {
  if (!twoPlans) return null;
  return el(
    'section',
    {class: 'part', id: 'differences', 'aria-labelledby': 'h-differences'},
    el('h2', {id: 'h-differences'}, 'Differences'),
    report.differences.length ? list(null, report.differences) : el('p', null, 'The two plans do not differ.'),
  );
}

function startNav(sections) {
  const nav = document.getElementById('nav');
  const links = new Map();
  for (const {id, title} of sections) {
    const link = el('a', {href: `#${id}`}, title);
    links.set(id, link);
    nav.append(el('li', null, link));
  }
  const watch = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        for (const link of links.values()) link.removeAttribute('aria-current');
        links.get(entry.target.id).setAttribute('aria-current', 'true');
      }
    },
    {rootMargin: '-20% 0px -75% 0px'},
  );
  for (const {id} of sections) watch.observe(document.getElementById(id));
}

function start() {
  const main = document.getElementById('main');
  document.body.append(hatchPatterns());
  startTheme();
  const sections = SECTIONS.filter((section) => report.plans.some(section.has));
  const made = [...new Set(report.plans.map((plan) => plan.made_with).filter(Boolean))];
  const filesRead = report.plans.map((plan) => plan.file).filter(Boolean);
  main.append(el('p', {class: 'lead'}, filesRead.map((file) => short(file, 200)).join(' and ')));
  for (const [index, section] of sections.entries()) {
    main.append(
      el(
        'section',
        {class: 'part', id: section.id, 'aria-labelledby': `h-${section.id}`},
        el('h2', {id: `h-${section.id}`}, section.title),
        el('p', {class: 'lead'}, section.lead),
      ),
    );
    if (index === 0 && twoPlans) main.append(drawDifferences());
  }
  document
    .getElementById('footer')
    .append(
      `Made with ${made.map((name) => short(name, 80)).join(' and ') || 'partitioner'}. ` +
        'Times are predicted unless they are called measured.',
    );
  startNav(twoPlans ? [sections[0], {id: 'differences', title: 'Differences'}, ...sections.slice(1)] : sections);
  const rest = [...sections];
  const drawNext = () => {
    const section = rest.shift();
    if (!section) {
      document.documentElement.dataset.ready = 'yes';
      return;
    }
    drawSection(section);
    setTimeout(drawNext);
  };
  window.addEventListener('beforeprint', () => {
    while (rest.length) drawSection(rest.shift());
  });
  drawNext();
}

start();
